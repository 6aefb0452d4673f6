"""The documents that begin in a block of bytes, so that blocks are read alone and in any order.

Owns where lines begin and what a line of JSONL holds. `files.py` and `compressed.py` say which
bytes are blocks.
"""

import bisect
import io
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from trainer.data.rows import BadRow
from trainer.data.text.settings import setting
from trainer.errors import UserError

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20
NUM_NAMED = 10
LONG_LINE_BYTES = 1 << 22
"""From here on a line is remembered (150 bytes each): every block inside it looks for its end."""


class SkippedRows:
    """Logs what rows are left out: the first `NUM_NAMED`, then one at every tenfold."""

    def __init__(self) -> None:
        self._num_rows = 0
        self._next = 1

    def add(self, what: str) -> None:
        """Count a row; `what` says where it lies and what is wrong with it."""
        self._num_rows += 1
        if self._num_rows == self._next:
            self._next = self._next + 1 if self._next < NUM_NAMED else 10 * self._next
            logger.warning("skipped row %d: %s", self._num_rows, what)


@dataclass(frozen=True)
class TextFormat:
    """What is read of a file.

    Args:
        is_jsonl: a row is a document; otherwise all text of a block is one.
        column: field of a row that holds the text.
        skipped: takes the rows that are no JSON or have no text there; None: they are refused.
        field: the source's name, for messages.
    """

    is_jsonl: bool = False
    column: str = "text"
    skipped: SkippedRows | None = None
    field: str = "data.source"


@dataclass(frozen=True)
class Block:
    """Bytes `start:stop` of a file, or of what it unpacks to.

    Args:
        path: of the file.
        start: first byte.
        stop: behind the last byte.
        limit: bytes of a whole block, which a file's last is shorter than.
    """

    path: Path
    start: int
    stop: int
    limit: int


class LongLines:
    """Where the long lines of files end, so that none is gone through twice."""

    def __init__(self) -> None:
        self._spans: dict[Path, list[tuple[int, int]]] = {}
        """Of each file (end, begin): no line begins behind `begin` and before `end`."""

    def end(self, path: Path, position: int) -> int | None:
        """Return the end of the long line around a position, if one is known."""
        spans = self._spans.get(path, [])
        index = bisect.bisect_left(spans, (position, 0))
        if index < len(spans) and spans[index][1] <= position:
            return spans[index][0]
        return None

    def remember(self, path: Path, begin: int, end: int) -> None:
        """Note that no line begins behind `begin` and before `end`, where one does."""
        spans = self._spans.setdefault(path, [])
        index = bisect.bisect_left(spans, (end, 0))
        if index < len(spans) and spans[index][0] == end:
            spans[index] = (end, min(begin, spans[index][1]))
        else:
            spans.insert(index, (end, begin))


def block_texts(file: BinaryIO, block: Block, form: TextFormat, long_lines: LongLines) -> list[str]:
    """Return the documents that begin in a block.

    Args:
        file: sought and read from a byte before the block to the end of its last line.
        block: to read.
        form: of the file.
        long_lines: known of the source so far.

    Raises:
        UserError: bytes are not UTF-8, or a row is bad; names file and byte.
    """
    content, start = _owned_bytes(file, block, form, long_lines)
    if not form.is_jsonl:
        text = _plain_text(content, start, block.path)
        return [text] if text.strip() else []
    return [text for text in _texts_of_rows(content, start, form, block.path) if text]


def _owned_bytes(
    file: BinaryIO, block: Block, form: TextFormat, long_lines: LongLines
) -> tuple[bytes, int]:
    """Return the whole lines that begin in a block, and where the first of them begins."""

    def line_start(position: int) -> int:
        if position == 0:
            return 0
        # A row is never cut, however long; plain text without line ends must be cut somewhere.
        if form.is_jsonl:
            return _row_start(file, position, block.path, long_lines)
        return _text_start(file, position, block.limit)

    start, stop = line_start(block.start), line_start(block.stop)
    file.seek(start)
    return file.read(max(0, stop - start)), start


def _row_start(file: BinaryIO, position: int, path: Path, long_lines: LongLines) -> int:
    """Return where the first line begins at or behind a position above 0, or the file's end."""
    # A line begins behind a newline: one byte further back tells if it is here.
    at = file.seek(position - 1)
    known = long_lines.end(path, position)
    while known is None:
        piece = file.readline(_CHUNK_BYTES)
        at += len(piece)
        if piece.endswith(b"\n") or len(piece) < _CHUNK_BYTES:
            break
        known = long_lines.end(path, at)
    end = at if known is None else known
    if end - position >= LONG_LINE_BYTES:
        long_lines.remember(path, position, end)
    return end


def _text_start(file: BinaryIO, position: int, limit: int) -> int:
    """As `_row_start`; if no line begins within `limit` bytes, the next character will do."""
    file.seek(position - 1)
    line = file.readline(limit)
    if line.endswith(b"\n") or len(line) < limit:
        return position - 1 + len(line)
    is_character = [byte & 0xC0 != 0x80 for byte in line[1:5]]
    return position + (is_character.index(True) if True in is_character else 0)


def _plain_text(content: bytes, start: int, path: Path) -> str:
    try:
        return content.decode("utf-8-sig" if start == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: byte {start + error.start} is not UTF-8 text ({error.reason}): convert the "
            "file to UTF-8 or remove it"
        ) from error


def _lines(content: bytes, start: int) -> Iterator[tuple[int, bytes]]:
    for line in io.BytesIO(content):
        yield start, line
        start += len(line)


def _texts_of_rows(content: bytes, start: int, form: TextFormat, path: Path) -> Iterator[str]:
    for offset, line in _lines(content, start):
        if not line.strip():
            continue
        try:
            yield _row_text(line, form, offset)
        except BadRow as error:
            if form.skipped is None:
                raise UserError(
                    f"{path}: {error} (or set {setting(form.field, 'on_bad_row')}='skip' to leave "
                    "such rows out)"
                ) from error
            form.skipped.add(f"{path}: {error}")


def _row_text(line: bytes, form: TextFormat, offset: int) -> str:
    column = form.column
    try:
        row = json.loads(line.decode("utf-8-sig"))
    # A number of thousands of digits is a plain ValueError, as is what is not UTF-8.
    except (ValueError, RecursionError) as error:
        raise BadRow(
            "not_json", f"the line at byte {offset} is not JSON ({error}): mend it"
        ) from error
    if not isinstance(row, dict) or not isinstance(row.get(column), str):
        raise BadRow(
            "no_text",
            f"the row at byte {offset} has no text in {column!r} (found {_found(row, column)}): "
            f"name the field that has it in {setting(form.field, 'column')}",
        )
    try:
        row[column].encode()
    except UnicodeEncodeError as error:
        raise BadRow(
            "not_unicode",
            f"the row at byte {offset} has half a surrogate pair at character {error.start} of "
            "its text: mend it",
        ) from error
    return row[column]


def _found(row: Any, column: str) -> str:
    """Return what stands where text should."""
    if not isinstance(row, dict):
        return f"a {type(row).__name__}"
    if column in row:
        return f"a {type(row[column]).__name__} there"
    return f"the fields {', '.join(row)}"
