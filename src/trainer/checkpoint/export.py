"""Hugging Face weights from a checkpoint: no ranks, no model, no optimizer.

Owns `trainer export`. The model's tensors are read one at a time from the DCP files; the peak of
host memory is the largest parameter (read in its own dtype, then cast) and one output file. The
optimizer's tensors are never read. `trainer.model.hf_files` owns the layout.
"""

import json
import logging
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.metadata import Metadata

from trainer.checkpoint.integrity import check_tensors_alone
from trainer.checkpoint.manifest import check_files, read_manifest
from trainer.checkpoint.safe_load import read_index, read_tensor, tensor_entries
from trainer.checkpoint.state import MODEL
from trainer.durable import beside, publish, start_folder
from trainer.errors import UserError
from trainer.model.hf_files import DEFAULT_SHARD_GIB, GIB, WeightFiles, plan_files, weight_dtype
from trainer.model.hf_names import published_pieces
from trainer.origin import find_checkpoint
from trainer.saved_steps import HF_FOLDER

logger = logging.getLogger(__name__)


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    dtype: str = "bfloat16",
    max_shard_gib: float = DEFAULT_SHARD_GIB,
) -> None:
    """Write the weights of a checkpoint in Hugging Face layout; complete or absent.

    Args:
        checkpoint: A complete `checkpoints/step_N`.
        out: New or empty folder.
        dtype: `float32`, `bfloat16` or `float16`.
        max_shard_gib: Largest safetensors file in GiB.

    Raises:
        UserError: no complete checkpoint, an `out` that holds something or lies in the checkpoint,
            an unknown dtype, or a checkpoint that is damaged or unsafe.
        RuntimeError: the weights could not be written; nothing is left behind.
    """
    target = weight_dtype(dtype)
    found = find_checkpoint(str(checkpoint), "checkpoint")
    if found is None:
        raise UserError(
            f"checkpoint={checkpoint} is no complete checkpoint: give a folder "
            "checkpoints/step_N of a run"
        )
    _start(out, found)
    try:
        check_files(found, read_manifest(found))
        index = read_index(found)
        check_tensors_alone(found, index, MODEL)
        _write_weights(found, index, beside(out), target, max_shard_gib)
        _copy_companions(found / HF_FOLDER, beside(out), dtype)
        publish(out)
    except (OSError, ValueError, SafetensorError) as failure:
        shutil.rmtree(beside(out), ignore_errors=True)
        if isinstance(failure, UserError):
            raise
        raise RuntimeError(f"weights were not written to {out}: {failure}") from failure


def _start(out: Path, checkpoint: Path) -> None:
    """Make the folder to write in, or refuse a place that holds something or can hold no folder."""
    try:
        if out.resolve().is_relative_to(checkpoint.resolve()):
            raise FileExistsError("it lies in the checkpoint, which stays as it was saved")
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise FileExistsError("it exists and is not an empty folder")
        start_folder(out)
    except (OSError, ValueError) as error:
        raise UserError(f"out={str(out)!r} cannot be written ({error}): choose another") from error


def _write_weights(
    checkpoint: Path, index: Metadata, folder: Path, dtype: torch.dtype, max_shard_gib: float
) -> None:
    pieces = {
        name: published_pieces(name.removeprefix(MODEL), tuple(entry.size))
        for name, entry in tensor_entries(index, MODEL).items()
    }
    plan = plan_files([piece for cut in pieces.values() for piece in cut], dtype, max_shard_gib)
    files = WeightFiles(folder, plan)
    for name, cut in pieces.items():
        whole = read_tensor(checkpoint, index, name).to(dtype)
        for piece in cut:
            files.add(piece.name, piece.cut(whole))
    files.finish()
    logger.info(
        "%.2f GiB of %s weights in %d files", plan.total_bytes / GIB, dtype, len(plan.files)
    )


def _copy_companions(source: Path, folder: Path, dtype: str) -> None:
    shutil.copytree(source, folder, dirs_exist_ok=True)
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content["dtype"] = content["torch_dtype"] = dtype
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
