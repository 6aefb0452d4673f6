"""Hugging Face weights from the live, sharded model.

Owns the walk over the parameters: one is gathered to rank 0 at a time, cast before the wire, cut
into published tensors and written file by file, so no rank ever holds the model. Rank 0's peak
beside the model is one parameter (on the device and on the host) and one file (on the host), all in
the written dtype: `max_shard_gib` plus the largest stack of experts. `hf_files.py` owns the layout,
`trainer.checkpoint.export` the same from a checkpoint, without ranks.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainer.durable import beside, publish, start_folder
from trainer.errors import UserError
from trainer.model.finite import non_finite_names
from trainer.model.hf_files import (
    DEFAULT_SHARD_GIB,
    FilePlan,
    WeightFiles,
    plan_files,
    weight_dtype,
    write_companions,
)
from trainer.model.hf_names import Piece, published_pieces
from trainer.parallel.agreement import Ranks
from trainer.parallel.boxes import Box, holds_first_replica, local_box, local_part


def save_hf_weights(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    dtype: str = "bfloat16",
    max_shard_gib: float = DEFAULT_SHARD_GIB,
) -> None:
    """Write the model into `folder` so that plain transformers loads it; complete or absent.

    Args:
        model: The live model, its parameters DTensors on any mesh or plain tensors.
        tokenizer: Written beside it; None: no tokenizer.
        folder: Final folder; one of that name is replaced once the new one is durable.
        dtype: `float32`, `bfloat16` or `float16`.
        max_shard_gib: Largest safetensors file in GiB.

    Raises:
        UserError: the dtype is none of these, or cannot hold the weights; on every rank, nothing
            left.
        RuntimeError: the model is not finite, or rank 0 cannot write; on every rank, nothing left.

    Collective: all ranks of the default group; per parameter point-to-point sends to rank 0 and one
    broadcast of the outcome.
    """
    target = weight_dtype(dtype)
    ranks = Ranks()
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    names = non_finite_names(parameters)
    ranks.agree(f"weights are not saved: {names[0]} is not finite" if names else None)
    pieces = {name: published_pieces(name, tuple(p.shape)) for name, p in parameters.items()}
    plan = plan_files([piece for cut in pieces.values() for piece in cut], target, max_shard_gib)
    boxes = ranks.gather({name: _sent_box(p, ranks.rank) for name, p in parameters.items()})
    output = _FolderOnFirst(ranks, folder, plan)
    output.open()
    for name, parameter in parameters.items():
        whole = gather_to_first(parameter, [held[name] for held in boxes], target, ranks)
        output.add(whole, pieces[name])
    output.close(model, tokenizer, dtype)


def _sent_box(parameter: Tensor, rank: int) -> Box | None:
    box = local_box(parameter)
    return box if holds_first_replica(parameter, rank) and not box.is_empty else None


def gather_to_first(
    parameter: Tensor, boxes: list[Box | None], dtype: torch.dtype, ranks: Ranks
) -> Tensor | None:
    """Return the whole parameter on rank 0's host in `dtype`, None elsewhere.

    Args:
        parameter: DTensor or plain tensor.
        boxes: Per rank what it sends; None where another rank holds the same or there is nothing.
        dtype: Cast before sending.
        ranks: All ranks.

    Collective: every rank with a box sends it to rank 0, all at once.
    """
    local = local_part(parameter)
    if not ranks.is_first:
        if boxes[ranks.rank] is not None:
            _exchange([dist.P2POp(dist.isend, local.to(dtype).contiguous(), 0)])
        return None
    received: dict[int, Tensor] = {
        rank: torch.empty(box.sizes, dtype=dtype, device=local.device)
        for rank, box in enumerate(boxes)
        if box is not None and rank != 0
    }
    _exchange([dist.P2POp(dist.irecv, buffer, rank) for rank, buffer in received.items()])
    whole = torch.empty(parameter.shape, dtype=dtype)
    for rank, box in enumerate(boxes):
        if box is not None:
            whole[box.slices] = (received[rank] if rank else local).to("cpu", dtype)
    return whole


def _exchange(operations: list[dist.P2POp]) -> None:
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


class _FolderOnFirst:
    """The folder being written: rank 0 writes, every rank learns of a failure.

    Every method is collective over `ranks`; after a failure nothing is left beside `folder`.
    """

    def __init__(self, ranks: Ranks, folder: Path, plan: FilePlan) -> None:
        self._ranks = ranks
        self._folder = folder
        self._files = WeightFiles(beside(folder), plan)

    def open(self) -> None:
        self._attempt(lambda: start_folder(self._folder))

    def add(self, whole: Tensor | None, pieces: list[Piece]) -> None:
        def write() -> None:
            assert whole is not None
            for piece in pieces:
                self._files.add(piece.name, piece.cut(whole))

        self._attempt(write)

    def close(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, dtype: str
    ) -> None:
        def finish() -> None:
            self._files.finish()
            companions = beside(self._folder)
            write_companions(model.config, model.generation_config, tokenizer, companions, dtype)
            publish(self._folder)

        self._attempt(finish)

    def _attempt(self, write: Callable[[], object]) -> None:
        def write_or_clean_up() -> None:
            try:
                write()
            except (OSError, ValueError, RuntimeError, SafetensorError) as failure:
                shutil.rmtree(beside(self._folder), ignore_errors=True)
                kind = UserError if isinstance(failure, UserError) else RuntimeError
                raise kind(f"weights were not written to {self._folder}: {failure}") from failure

        self._ranks.on_first(write_or_clean_up, UserError, RuntimeError)
