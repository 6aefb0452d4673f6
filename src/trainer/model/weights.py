"""Reads Hugging Face safetensors into a sharded model; each rank reads only what it holds.

Owns which part of which file tensor lands where. Published checkpoints name each expert's matrices,
the model holds stacks; both forms are read (`hf_names.py`, read next). Writing is `export.py`.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from trainer.errors import UserError
from trainer.model.hf_names import Piece, published_pieces
from trainer.parallel.agreement import Ranks
from trainer.parallel.boxes import Box, local_box, local_part

_INDEX_FILE = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NUM_NAMED = 3
"""Tensors listed in a message; the rest is a count."""


@dataclass(frozen=True)
class WeightsRead:
    """What this rank took from the files."""

    num_tensors: int
    num_bytes: int


def load_weights_(model: nn.Module, folder: Path, *, copies: Mapping[str, str]) -> WeightsRead:
    """Fill every parameter of `model` from the safetensors files of `folder`.

    All names and shapes are checked before anything is read.

    Args:
        model: Materialized; parameters plain or DTensor.
        folder: Holds `model.safetensors`, or shards with an index.
        copies: Tensors that files may hold besides, each with the parameter it must equal: what is
            tied in the model.

    Raises:
        UserError: on all ranks: a file is missing or damaged, a tensor is missing, unknown or
            misshaped, or a copy differs, on any of them.

    Collective: all ranks, one all-gather before reading and one after.
    """
    ranks = Ranks()
    with ExitStack() as stack:
        files, plan = ranks.together(lambda: _plan(model, OpenFiles(folder, stack), copies))
        return ranks.together(lambda: _fill_(model, plan, files, copies))


class OpenFiles:
    """The opened safetensors files of a folder, by tensor name."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._handles: dict[Path, Any] = {}
        self._file_of: dict[str, Path] = {}
        for file in _list_files(folder):
            handle = stack.enter_context(_open(file))
            self._handles[file] = handle
            self._file_of |= dict.fromkeys(handle.keys(), file)
        self.names = frozenset(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        return tuple(self._slice(name).get_shape())

    def file_name(self, name: str) -> str:
        """Return the name of the file that holds a tensor."""
        return self._file_of[name].name

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """Return a part of a tensor, on the CPU, in the file's dtype; reads no more than that.

        Raises:
            UserError: the file cannot be read there, or what is there is no weight.
        """
        where = f"model.name={str(self.folder)!r}: tensor {name} in {self.file_name(name)}"
        try:
            values = self._slice(name)[part]
        except SafetensorError as error:
            raise UserError(f"{where} cannot be read ({error}): copy the file again") from error
        if values.dtype not in _DTYPES:
            raise UserError(
                f"{where} is {values.dtype}: quantized weights cannot be trained; use the model's "
                "weights in bfloat16 or float32"
            )
        if not values.isfinite().all():
            raise UserError(f"{where} holds values that are not finite: copy the file again")
        return values

    def _slice(self, name: str) -> Any:
        return self._handles[self._file_of[name]].get_slice(name)


def _list_files(folder: Path) -> list[Path]:
    """Return the files of a folder's weights; of a single file and an index, as transformers."""
    index = folder / _INDEX_FILE
    is_single = (folder / _SINGLE_FILE).is_file() or not index.is_file()
    names = [_SINGLE_FILE] if is_single else _indexed(index)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"model.name={str(folder)!r} lacks the weights file {_listed(missing)}: copy it there, "
            "or set model.weights = 'random'"
        )
    return [folder / name for name in names]


def _indexed(index: Path) -> list[str]:
    try:
        return sorted({str(file) for file in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{index} is not a weights index ({error!r}): copy the model again"
        raise UserError(problem) from error


def _open(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"weights file {file} is damaged or half-written ({error}, {file.stat().st_size} "
            "bytes): copy it again"
        ) from error


def _plan(
    model: nn.Module, files: OpenFiles, copies: Mapping[str, str]
) -> tuple[OpenFiles, dict[str, list[Piece]]]:
    """Return the files and, for each parameter, what to read from them; all of it checked."""
    plan = {name: _pieces(name, p, files) for name, p in model.named_parameters()}
    _check(plan, files, copies)
    return files, plan


def _pieces(name: str, parameter: nn.Parameter, files: OpenFiles) -> list[Piece]:
    """Return where the values of a parameter lie, in whichever form the files have."""
    shape = tuple(parameter.shape)
    return [Piece(name, shape)] if name in files.names else published_pieces(name, shape)


def _check(plan: dict[str, list[Piece]], files: OpenFiles, copies: Mapping[str, str]) -> None:
    needed = {piece.name: piece for pieces in plan.values() for piece in pieces}
    where = f"model.name={str(files.folder)!r}"
    missing = [name for name in needed if name not in files.names]
    if missing:
        raise UserError(
            f"{where} lacks the tensor {_listed(missing)}, which the architecture has: use weights "
            "of this architecture, or set model.weights = 'random'"
        )
    for copy, original in copies.items():
        if copy in files.names:
            needed[copy] = Piece(copy, needed[original].shape)
    extra = sorted(files.names - needed.keys())
    if extra:
        raise UserError(
            f"{where} holds the tensor {_listed(extra)} in {files.file_name(extra[0])}, which the "
            "architecture lacks: use weights of this architecture"
        )
    for name, piece in needed.items():
        if files.shape(name) != piece.shape:
            raise UserError(
                f"{where}: tensor {name} in {files.file_name(name)} has shape "
                f"{list(files.shape(name))}, the architecture {list(piece.shape)}: use weights of "
                "this architecture"
            )


@torch.no_grad()
def _fill_(
    model: nn.Module, plan: dict[str, list[Piece]], files: OpenFiles, copies: Mapping[str, str]
) -> WeightsRead:
    num_tensors = num_bytes = 0
    for name, parameter in model.named_parameters():
        held, local = local_box(parameter), local_part(parameter)
        for piece in plan[name]:
            place = _place(piece, tuple(parameter.shape))
            overlap = _overlap(held, place)
            if overlap.is_empty:
                continue
            # An expert's matrix has no dim for the expert.
            in_piece = _relative(overlap, place)[parameter.ndim - len(piece.shape) :]
            values = files.read(piece.name, in_piece)
            local[_relative(overlap, held)].copy_(values.view(overlap.sizes))
            num_tensors += 1
            num_bytes += values.nbytes
    for copy, original in copies.items():
        if copy in files.names:
            _check_copy(copy, original, model.get_parameter(original), files)
    return WeightsRead(num_tensors, num_bytes)


def _check_copy(copy: str, original: str, parameter: nn.Parameter, files: OpenFiles) -> None:
    """Compare this rank's part of a copy: transformers would not tie what differs."""
    local = local_part(parameter)
    values = files.read(copy, local_box(parameter).slices)
    if not torch.equal(values.to(local.device, local.dtype), local):
        raise UserError(
            f"model.name={str(files.folder)!r}: tensor {copy} in {files.file_name(copy)} differs "
            f"from {original}, and config.json has tie_word_embeddings=true: set that to false, or "
            "remove the tensor"
        )


def _place(piece: Piece, shape: tuple[int, ...]) -> Box:
    """Return the part of a parameter of `shape` that a piece fills, in all of its dims."""
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, index in enumerate(piece.index):
        cut = index if isinstance(index, slice) else slice(index, index + 1)
        offsets[dim], sizes[dim] = cut.start, cut.stop - cut.start
    return Box(tuple(offsets), tuple(sizes))


def _overlap(a: Box, b: Box) -> Box:
    starts = tuple(map(max, a.offsets, b.offsets))
    ends = (
        min(a_start + a_size, b_start + b_size)
        for a_start, a_size, b_start, b_size in zip(
            a.offsets, a.sizes, b.offsets, b.sizes, strict=True
        )
    )
    return Box(starts, tuple(max(0, end - start) for start, end in zip(starts, ends, strict=True)))


def _relative(box: Box, outer: Box) -> tuple[slice, ...]:
    offsets = (start - origin for start, origin in zip(box.offsets, outer.offsets, strict=True))
    return tuple(slice(start, start + size) for start, size in zip(offsets, box.sizes, strict=True))


def _listed(names: list[str]) -> str:
    rest = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" (and {rest} more)" if rest > 0 else "")
