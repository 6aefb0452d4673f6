"""The JSON part of a checkpoint: everything that is not a tensor.

Owns `manifest.json`: counters, data position and config as the loop gave them, the optimizer's
groups, how the checkpoint was made, and the size of every other file and the checksum of those
without tensors, so that a damaged one is found before a tensor is overwritten. Read `state.py` for
the tensors, `integrity.py` for their checksums.
"""

import json
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.durable import sync_path
from trainer.errors import UserError
from trainer.saved_steps import MANIFEST

FORMAT = 1
TENSORS = ".distcp"
"""Suffix of the files that hold tensors."""
_CHECKSUM = "checksum"
"""Key of the manifest's own CRC-32, over all its other keys."""


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
        checksums: CRC-32 of those that hold no tensors; empty in checkpoints of older versions.
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
    checksums: dict[str, int] = field(default_factory=dict)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, the last file of a checkpoint, and flush it.

    Raises:
        ValueError, TypeError: a value is not plain JSON (nan and inf included).
    """
    path = folder / MANIFEST
    content = asdict(manifest)
    content[_CHECKSUM] = _own_checksum(content)
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    sync_path(path)


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a complete checkpoint.

    Raises:
        UserError: it is missing, damaged or of another format.
    """
    path = folder / MANIFEST
    try:
        return _parse(json.loads(path.read_text()), path)
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is missing or damaged ({error}), so that {folder} is no checkpoint; choose "
            "another step"
        ) from error


def _parse(content: dict[str, Any], path: Path) -> Manifest:
    if content["format"] != FORMAT:
        raise UserError(
            f"{path}: format {content['format']}, this version reads format {FORMAT}; load it with "
            "the version that wrote it"
        )
    # Absent in checkpoints of older versions.
    checksum = content.pop(_CHECKSUM, None)
    if checksum not in (None, _own_checksum(content)):
        raise ValueError("its checksum does not agree; was it edited?")
    return Manifest(**{**content, "optimizer": OptimizerRecord(**content["optimizer"])})


def _own_checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, allow_nan=False).encode())


def file_sizes(folder: Path) -> dict[str, int]:
    """Return the size of every file under `folder`, by relative path."""
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }


def checksums(folder: Path) -> dict[str, int]:
    """Return the CRC-32 of every file under `folder` that holds no tensors, by relative path."""
    return {
        name: zlib.crc32((folder / name).read_bytes())
        for name in file_sizes(folder)
        if not name.endswith(TENSORS)
    }


def check_files(folder: Path, manifest: Manifest) -> None:
    """Compare the files with their sizes and checksums in the manifest.

    Raises:
        UserError: a file is missing, has another size or another content.
    """
    found = file_sizes(folder)
    damaged = [
        f"{name} ({found.get(name, 'no')} bytes of {size})"
        for name, size in manifest.files.items()
        if found.get(name) != size
    ]
    if not damaged:
        contents = checksums(folder)
        damaged = [
            f"{name} (its checksum does not agree)"
            for name, checksum in manifest.checksums.items()
            if contents.get(name) != checksum
        ]
    if damaged:
        raise UserError(
            f"{folder} is damaged: {', '.join(damaged)}; restore it or resume from another step"
        )
