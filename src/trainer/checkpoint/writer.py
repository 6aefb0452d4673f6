"""From a snapshot to a complete checkpoint: beside, durable, named, then what is old goes.

Owns the order of these and what a failure leaves behind: nothing. Runs on the calling thread or in
the background; all its collectives go over the ranks it is given.
"""

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint import CheckpointException
from transformers import PreTrainedTokenizerBase

from trainer.checkpoint.folder import prune
from trainer.checkpoint.manifest import Manifest, checksums, file_sizes, write_manifest
from trainer.checkpoint.match import architecture_of
from trainer.checkpoint.shards import describe_failure, write_shards
from trainer.checkpoint.snapshot import Snapshot
from trainer.durable import beside, publish, start_folder
from trainer.model.hf_files import write_companions
from trainer.parallel.agreement import Ranks
from trainer.saved_steps import HF_FOLDER, step_folder

logger = logging.getLogger(__name__)

_FAILURES = (OSError, ValueError, TypeError, KeyError)
"""Of writing, on rank 0: files, and what a config or a tokenizer makes of itself."""


@dataclass(frozen=True)
class CheckpointWriter:
    """Writes snapshots under `root`.

    Attributes:
        root: The folder of checkpoints.
        ranks: All ranks, over a group that only the writer and its store use.
        keep_last: How many of the newest to keep; None: all.
        keep_every: Besides these, keep steps divisible by this; None: none.
        tokenizer: Saved beside the model's config; None: none.
    """

    root: Path
    ranks: Ranks
    keep_last: int | None
    keep_every: int | None
    tokenizer: PreTrainedTokenizerBase | None

    def write(self, snapshot: Snapshot) -> None:
        """Write one checkpoint, complete or absent, then delete what need not be kept.

        Raises:
            RuntimeError: some rank could not write; on every rank, and nothing is left of it.

        Collective: all ranks.
        """
        final = step_folder(self.root, snapshot.step)
        try:
            self.ranks.on_first(lambda: start_folder(final), *_FAILURES)
            write_shards(beside(final), snapshot.shards, self.ranks.group)
            self.ranks.on_first(lambda: self._complete(final, snapshot), *_FAILURES)
        except (*_FAILURES, CheckpointException) as failure:
            if self.ranks.is_first:
                shutil.rmtree(beside(final), ignore_errors=True)
            raise RuntimeError(describe_failure(failure)) from None
        if self.ranks.is_first:
            self._prune(snapshot.step)

    def _complete(self, final: Path, snapshot: Snapshot) -> None:
        """Add the JSON part to the written tensors and give the folder its name (rank 0)."""
        partial = beside(final)
        companions = partial / HF_FOLDER
        companions.mkdir()
        write_companions(
            snapshot.model_config, snapshot.generation_config, self.tokenizer, companions
        )
        manifest = Manifest(
            step=snapshot.step,
            world_size=self.ranks.size,
            num_threads=torch.get_num_threads(),
            torch=torch.__version__,
            architecture=architecture_of(snapshot.model_config),
            optimizer=snapshot.optimizer,
            progress=snapshot.progress,
            files=file_sizes(partial),
            checksums=checksums(partial),
        )
        write_manifest(partial, manifest)
        publish(final)

    def _prune(self, newest: int) -> None:
        try:
            prune(self.root, newest, self.keep_last, self.keep_every)
        except OSError as failure:
            # The new checkpoint is durable; what is left too many is no reason to end the run.
            logger.warning("older checkpoints in %s could not be removed: %s", self.root, failure)
