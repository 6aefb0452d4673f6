"""Plain text and JSONL files as pages, without reading them beforehand.

Owns the division of files into blocks of bytes, which follows from their sizes alone: a block owns
the lines that begin in it, so blocks are read alone and in any order. In memory lie one page and 24
bytes a file.
"""

import bisect
import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from trainer.data.text.pages import Cursor, Page, Shuffle
from trainer.errors import UserError

logger = logging.getLogger(__name__)

PAGE_BLOCKS = 64
"""Blocks whose documents are shuffled together."""
JSONL = ".jsonl"


@dataclass(frozen=True)
class JsonlRows:
    """What is read of a JSONL row.

    Args:
        column: field that holds the text.
        skips_bad: leave out a row that is no JSON or has no text there, with a line in the log.
    """

    column: str = "text"
    skips_bad: bool = False


@dataclass(frozen=True)
class Block:
    """Bytes `start:stop` of a file."""

    path: Path
    start: int
    stop: int
    limit: int
    """Bytes of a whole block, which a file's last is shorter than."""


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
        names = "\n".join(f"{p.name} {s}" for p, s in zip(self.paths, self._sizes, strict=True))
        return {
            "files": len(self.paths),
            "bytes": self.num_bytes,
            "names and sizes": hashlib.blake2b(names.encode(), digest_size=16).hexdigest(),
            "block_bytes": self._block_bytes,
        }


class FilePages:
    """Text or JSONL files in pages of `PAGE_BLOCKS` blocks.

    Args:
        blocks: of the files; not empty.
        rows: what is read of a JSONL row.
        shuffle: order of blocks, and of documents in a page.
    """

    def __init__(self, blocks: FileBlocks, rows: JsonlRows, shuffle: Shuffle) -> None:
        self._blocks = blocks
        self._rows = rows
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
            texts += read_block(self._blocks[self._shuffle.place(index, total, epoch)], self._rows)
        documents = self._shuffle.reorder(texts, epoch, number)
        return Page(documents, (number + 1,) if stop < total else None)

    def fraction(self, cursor: Cursor) -> float:
        """Return the part of the blocks before a cursor."""
        return min(1.0, cursor[0] * PAGE_BLOCKS / len(self._blocks))


def file_size(path: Path) -> int:
    """Return a file's bytes.

    Raises:
        UserError: it is not there.
    """
    try:
        return path.stat().st_size
    except OSError as error:
        raise UserError(
            f"data.source: {path} cannot be read ({error.strerror}): restore the file"
        ) from error


def read_block(block: Block, rows: JsonlRows) -> list[str]:
    """Return the documents that begin in a block.

    Raises:
        UserError: the file is gone or not UTF-8, or a row is bad; names file and byte.
    """
    content, start = _owned_bytes(block)
    if block.path.suffix != JSONL:
        text = _decode(content, block.path, start)
        return [text] if text.strip() else []
    texts: list[str] = []
    for offset, line in _lines(content, start):
        if line.strip():
            try:
                texts.append(_row_text(line, rows.column, block.path, offset))
            except UserError as error:
                if not rows.skips_bad:
                    raise
                logger.warning("skipped: %s", error)
    return texts


def _owned_bytes(block: Block) -> tuple[bytes, int]:
    """Return the whole lines that begin in a block, and where the first of them begins."""
    # A row is never cut, however long; plain text without line ends must be cut somewhere.
    limit = -1 if block.path.suffix == JSONL else block.limit
    try:
        with block.path.open("rb") as file:
            start = _line_start(file, block.start, limit)
            stop = _line_start(file, block.stop, limit)
            file.seek(start)
            return file.read(max(0, stop - start)), start
    except OSError as error:
        raise UserError(
            f"data.source: {block.path} cannot be read ({error.strerror}): restore the file"
        ) from error


def _line_start(file: BinaryIO, position: int, limit: int) -> int:
    """Return where the first line begins at or behind a position, or the file's end.

    Blocks on both sides of a position ask this, so they agree.

    Args:
        file: to look into.
        position: a byte.
        limit: bytes to search for the line's end; if there is none, the next character will do.
            Negative: no limit.
    """
    if position == 0:
        return 0
    # A line begins behind a newline: one byte further back tells if it is here.
    file.seek(position - 1)
    line = file.readline(limit)
    if line.endswith(b"\n") or len(line) < limit or limit < 0:
        return position - 1 + len(line)
    is_character = [byte & 0xC0 != 0x80 for byte in line[1:5]]
    return position + (is_character.index(True) if True in is_character else 0)


def _lines(content: bytes, start: int) -> Iterator[tuple[int, bytes]]:
    for line in content.split(b"\n"):
        yield start, line
        start += len(line) + 1


def _decode(content: bytes, path: Path, start: int) -> str:
    try:
        return content.decode("utf-8-sig" if start == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: byte {start + error.start} is not UTF-8 text ({error.reason}): convert the "
            "file to UTF-8 or remove it"
        ) from error


def _row_text(line: bytes, column: str, path: Path, offset: int) -> str:
    try:
        row = json.loads(_decode(line, path, offset))
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}: the line at byte {offset} is not JSON ({error}): mend it, or set "
            "data.source.on_bad_row = 'skip'"
        ) from error
    if not isinstance(row, dict) or not isinstance(row.get(column), str):
        found = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise UserError(
            f"{path}: the row at byte {offset} has no text in {column!r} (found {found}): name the "
            "field that has it in data.source.column, or set data.source.on_bad_row = 'skip'"
        )
    return row[column]
