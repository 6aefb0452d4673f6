"""From a complete checkpoint into a live model and optimizer: checked by name, then read in place.

Owns the order of a load. `match.py` owns what does not fit, `safe_load.py` what is not read.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer
from transformers import PreTrainedModel

from trainer.checkpoint.integrity import check_tensors
from trainer.checkpoint.manifest import Manifest, check_files, read_manifest
from trainer.checkpoint.match import find_mismatch, find_network_mismatch
from trainer.checkpoint.rng import restore_rng
from trainer.checkpoint.safe_load import read_index, tensor_entries
from trainer.checkpoint.shards import LocalShard, Shards, describe_failure, read_shards
from trainer.checkpoint.state import (
    MODEL,
    OPTIMIZER,
    RNG,
    all_shards,
    apply_optimizer,
    model_tensors,
    view_optimizer,
)
from trainer.errors import UserError
from trainer.parallel.agreement import Ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenCheckpoint:
    """A complete checkpoint whose small files have been read and checked.

    Attributes:
        folder: Where it lies.
        manifest: Its JSON part.
        index: Its tensors by name.
    """

    folder: Path
    manifest: Manifest
    index: Metadata


def open_checkpoint(folder: Path) -> OpenCheckpoint:
    """Read and check what describes a checkpoint, no tensor yet.

    Raises:
        UserError: it is damaged, truncated or unsafe.
    """
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    return OpenCheckpoint(folder, manifest, read_index(folder))


def load_into(
    checkpoint: OpenCheckpoint, model: PreTrainedModel, optimizer: Optimizer, ranks: Ranks
) -> None:
    """Fill model, optimizer and random generators from a checkpoint.

    Raises:
        UserError: it does not fit; on every rank, nothing overwritten.
        RuntimeError: some rank failed to read; on every rank.

    Collective: all ranks.
    """
    view = view_optimizer(model, optimizer)
    rng = _room_for_rng(checkpoint, ranks)
    shards = all_shards(model, view, rng, ranks.rank)
    mismatch = find_mismatch(
        optimizer, view, shards, checkpoint.index, checkpoint.manifest, model.config
    )
    refusal = None if mismatch is None else f"{checkpoint.folder} does not fit this run: {mismatch}"
    ranks.agree(refusal, UserError)
    _read(checkpoint, shards, ranks, (MODEL, OPTIMIZER, RNG))
    apply_optimizer(optimizer, view, checkpoint.manifest.optimizer)
    if rng:
        restore_rng(rng)


def load_weights_into(checkpoint: OpenCheckpoint, model: PreTrainedModel, ranks: Ranks) -> None:
    """Fill the model alone, as it is sharded: each rank reads the saved parts that it holds of.

    Raises:
        UserError: it does not fit; on every rank, nothing overwritten.
        RuntimeError: some rank failed to read; on every rank.

    Collective: all ranks.
    """
    tensors = model_tensors(model)
    shards = {MODEL + name: LocalShard.of(tensor) for name, tensor in tensors.items()}
    mismatch = find_network_mismatch(shards, checkpoint.index, checkpoint.manifest, model.config)
    refusal = None if mismatch is None else f"{checkpoint.folder} does not fit: {mismatch}"
    ranks.agree(refusal, UserError)
    _read(checkpoint, shards, ranks, (MODEL,))


def _read(
    checkpoint: OpenCheckpoint, shards: Shards, ranks: Ranks, prefixes: tuple[str, ...]
) -> None:
    check_tensors(checkpoint.folder, checkpoint.index, prefixes, ranks)
    try:
        read_shards(checkpoint.folder, checkpoint.index, shards, ranks.group)
    except CheckpointException as failure:
        message = f"{checkpoint.folder} could not be read: {describe_failure(failure)}"
        raise RuntimeError(message) from None


def _room_for_rng(checkpoint: OpenCheckpoint, ranks: Ranks) -> dict[str, Tensor]:
    """Return room for this rank's generators; empty if another number of ranks wrote them."""
    if checkpoint.manifest.world_size != ranks.size:
        return {}
    prefix = f"{RNG}{ranks.rank}."
    return {
        key.removeprefix(prefix): torch.empty(entry.size, dtype=torch.uint8)
        for key, entry in tensor_entries(checkpoint.index, prefix).items()
    }


def log_what_differs(manifest: Manifest, ranks: Ranks) -> None:
    """Say what makes the resumed run's numbers differ from the uninterrupted one's (rank 0)."""
    if not ranks.is_first:
        return
    if manifest.world_size != ranks.size:
        logger.warning(
            "world size %d -> %d: sums are associated otherwise, and the random generators start "
            "from the seed",
            manifest.world_size,
            ranks.size,
        )
    if manifest.num_threads != torch.get_num_threads():
        logger.warning(
            "threads a rank %d -> %d: sums are associated otherwise",
            manifest.num_threads,
            torch.get_num_threads(),
        )
    if manifest.torch != torch.__version__:
        logger.warning("torch %s -> %s: kernels may differ", manifest.torch, torch.__version__)
