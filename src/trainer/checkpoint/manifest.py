"""The JSON part of a checkpoint: everything that is not a tensor.

Owns `manifest.json`: counters, data position and config as the loop gave them, the optimizer's
groups, how the checkpoint was made, and the size of every other file, so that a truncated one is
found before a tensor is overwritten. Read `state.py` for the tensors.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.durable import sync_path
from trainer.errors import UserError
from trainer.saved_steps import MANIFEST

FORMAT = 1


@dataclass(frozen=True)
class OptimizerRecord:
    """The optimizer's class and groups; its tensors lie beside the model's.

    Attributes:
        type: Class name: checkpoints load into an optimizer of the same one.
        groups: Per group `names` of its parameters and `settings`.
    """

    type: str
    groups: list[dict[str, Any]]


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` holds.

    Attributes:
        step: The step after which the checkpoint was taken.
        world_size: Ranks that wrote it.
        num_threads: Intra-op threads a rank had; sums depend on it.
        torch: Version of torch that wrote it.
        architecture: What makes the network, by config field.
        optimizer: Class and groups.
        progress: The loop's own state, JSON values only.
        files: Bytes of every other file, by path inside the folder.
    """

    step: int
    world_size: int
    num_threads: int
    torch: str
    architecture: dict[str, Any]
    optimizer: OptimizerRecord
    progress: dict[str, Any]
    files: dict[str, int]
    format: int = FORMAT


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, the last file of a checkpoint, and flush it.

    Raises:
        ValueError, TypeError: a value is not plain JSON (nan and inf included).
    """
    path = folder / MANIFEST
    path.write_text(json.dumps(asdict(manifest), indent=1, allow_nan=False) + "\n")
    sync_path(path)


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a complete checkpoint.

    Raises:
        UserError: it is missing, damaged or of another format.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise UserError(
                f"{path}: format {content['format']}, this version reads format {FORMAT}; load it "
                "with the version that wrote it"
            )
        return Manifest(**{**content, "optimizer": OptimizerRecord(**content["optimizer"])})
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is missing or damaged ({error}), so that {folder} is no checkpoint; choose "
            "another step"
        ) from error


def file_sizes(folder: Path) -> dict[str, int]:
    """Return the size of every file under `folder`, by relative path."""
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }


def check_files(folder: Path, manifest: Manifest) -> None:
    """Compare the files with their sizes in the manifest.

    Raises:
        UserError: a file is missing or has another size.
    """
    found = file_sizes(folder)
    damaged = [
        f"{name} ({found.get(name, 'no')} bytes of {size})"
        for name, size in manifest.files.items()
        if found.get(name) != size
    ]
    if damaged:
        raise UserError(
            f"{folder} is damaged: {', '.join(damaged)}; restore it or resume from another step"
        )
