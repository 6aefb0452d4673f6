"""Whether the tensors of a checkpoint are, byte for byte, those that were written.

Owns the check of tensor files; those beside them are `manifest.py`'s. DCP writes each tensor's box
as an archive of its own, with a CRC-32 of its bytes that torch writes and does not read.
"""

import io
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import BinaryIO

from torch.distributed.checkpoint.metadata import Metadata

from trainer.errors import UserError
from trainer.parallel.agreement import Ranks


def check_tensors(folder: Path, index: Metadata, prefixes: tuple[str, ...], ranks: Ranks) -> None:
    """Compare the checksums of tensors; each byte is read by one rank, one box at a time.

    Args:
        folder: A complete checkpoint.
        index: Its tensors.
        prefixes: Which of them, by the start of their names.
        ranks: Among which the boxes are dealt.

    Raises:
        UserError: some do not agree; on every rank, with their names.

    Collective: all ranks, one all-gather.
    """
    names = _damaged(folder, index, prefixes, ranks.rank, ranks.size)
    found = sorted({name for part in ranks.gather(names) for name in part})
    refuse_damaged(folder, found)


def check_tensors_alone(folder: Path, index: Metadata, prefix: str) -> None:
    """Do the same without ranks, for the tensors whose names start with `prefix`."""
    refuse_damaged(folder, _damaged(folder, index, (prefix,), 0, 1))


def refuse_damaged(folder: Path, names: list[str]) -> None:
    """Raise if any tensor is damaged.

    Raises:
        UserError: `names` is not empty.
    """
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise UserError(
            f"{folder} is damaged: the checksums of {', '.join(names[:3])}{more} do not agree; "
            "restore it or resume from another step"
        )


def _damaged(
    folder: Path, index: Metadata, prefixes: tuple[str, ...], rank: int, size: int
) -> list[str]:
    """Return the names of the tensors whose box, of those dealt to `rank`, is not as written."""
    boxes = sorted(
        (info.relative_path, info.offset, info.length, key.fqn)
        for key, info in (index.storage_data or {}).items()
        if key.fqn.startswith(prefixes)
    )
    by_file: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for path, offset, length, name in boxes[rank::size]:
        by_file[path].append((offset, length, name))
    damaged: list[str] = []
    for path, places in by_file.items():
        try:
            with (folder / path).open("rb") as file:
                damaged += [name for at, length, name in places if not _is_whole(file, at, length)]
        except OSError:
            # Raised by this rank alone, it would leave the others waiting for its answer.
            damaged += [name for _, _, name in places]
    return damaged


def _is_whole(file: BinaryIO, offset: int, length: int) -> bool:
    try:
        file.seek(offset)
        with zipfile.ZipFile(io.BytesIO(file.read(length))) as members:
            return members.testzip() is None
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError, ValueError, EOFError):
        # A disk that fails, or what a flipped bit makes of an archive's own tables.
        return False
