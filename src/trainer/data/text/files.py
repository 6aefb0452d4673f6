"""Plain text and JSONL files as pages, without reading them beforehand.

Owns the division of files into blocks of bytes, which follows from their sizes alone; which
documents are in a block is `blocks.py`'s. In memory lie one page and 24 bytes a file.
"""

import bisect
import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.data.text.blocks import Block, LongLines, TextFormat, block_texts
from trainer.data.text.pages import Cursor, Page, Shuffle
from trainer.errors import UserError

PAGE_BLOCKS = 64
"""Blocks whose documents are shuffled together."""
JSONL = ".jsonl"


class FileBlocks:
    """The blocks of some files, numbered across all of them.

    Args:
        paths: in order.
        block_bytes: size of a block; the last of a file is shorter. An empty file has none.

    Raises:
        UserError: a file is not there.
    """

    def __init__(self, paths: Sequence[Path], block_bytes: int) -> None:
        self.paths = list(paths)
        self._block_bytes = block_bytes
        self._sizes = [file_size(path) for path in self.paths]
        self._ends: list[int] = []
        for size in self._sizes:
            self._ends.append((self._ends[-1] if self._ends else 0) + -(-size // block_bytes))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Block:
        file = bisect.bisect_right(self._ends, index)
        start = (index - (self._ends[file - 1] if file else 0)) * self._block_bytes
        stop = min(start + self._block_bytes, self._sizes[file])
        return Block(self.paths[file], start, stop, self._block_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(self._sizes)

    @property
    def identity(self) -> dict[str, Any]:
        """Number, sizes and names of the files, and the size of a block."""
        return describe_files(self.paths, self._sizes, self._block_bytes)


class FilePages:
    """Text or JSONL files in pages of `PAGE_BLOCKS` blocks.

    Args:
        blocks: of the files; not empty.
        rows: what is read of a JSONL row; other files are plain text.
        shuffle: order of blocks, and of documents in a page.
    """

    def __init__(self, blocks: FileBlocks, rows: TextFormat, shuffle: Shuffle) -> None:
        self._blocks = blocks
        self._rows = rows
        self._long_lines = LongLines()
        self._shuffle = shuffle

    @property
    def identity(self) -> dict[str, Any]:
        """As `FileBlocks.identity`."""
        return self._blocks.identity

    @property
    def num_pages(self) -> int:
        """Pages of an epoch."""
        return -(-len(self._blocks) // PAGE_BLOCKS)

    @property
    def num_bytes(self) -> int:
        """Bytes of the files."""
        return self._blocks.num_bytes

    def page(self, epoch: int, cursor: Cursor) -> Page:
        """Read the blocks of a page.

        Raises:
            UserError: a file is gone or not UTF-8, or a row has no text.
        """
        number, total = cursor[0], len(self._blocks)
        start = number * PAGE_BLOCKS
        stop = min(start + PAGE_BLOCKS, total)
        texts: list[str] = []
        for index in range(start, stop):
            texts += self._read(self._blocks[self._shuffle.place(index, total, epoch)])
        documents = self._shuffle.reorder(texts, epoch, number)
        return Page(documents, (number + 1,) if stop < total else None)

    def fraction(self, cursor: Cursor) -> float:
        """Return the part of the blocks before a cursor."""
        return min(1.0, cursor[0] * PAGE_BLOCKS / len(self._blocks))

    def _read(self, block: Block) -> list[str]:
        form = format_of(block.path, self._rows)
        try:
            with block.path.open("rb") as file:
                return block_texts(file, block, form, self._long_lines)
        except OSError as error:
            raise unreadable(block.path, error) from error


def file_size(path: Path) -> int:
    """Return a file's bytes.

    Raises:
        UserError: it is not there.
    """
    try:
        return path.stat().st_size
    except OSError as error:
        raise unreadable(path, error) from error


def describe_files(paths: Sequence[Path], sizes: Sequence[int], block_bytes: int) -> dict[str, Any]:
    """Return what a position in files depends on: their number, sizes and names, and a block's."""
    names = b"\n".join(
        b"%s %d" % (os.fsencode(path.name), size) for path, size in zip(paths, sizes, strict=True)
    )
    return {
        "files": len(paths),
        "bytes": sum(sizes),
        "names and sizes": hashlib.blake2b(names, digest_size=16).hexdigest(),
        "block_bytes": block_bytes,
    }


def format_of(path: Path, rows: TextFormat) -> TextFormat:
    """Return how a file is read: as rows if its name says JSONL, in any case of letters."""
    return replace(rows, is_jsonl=path.suffix.lower() == JSONL)


def unreadable(path: Path, error: OSError) -> UserError:
    """Return what to say of a file that is not there or cannot be read."""
    return UserError(f"{path} cannot be read ({error.strerror}): restore the file")
