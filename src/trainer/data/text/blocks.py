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

from trainer.errors import UserError

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20
LONG_LINE_BYTES = 1 << 22
"""From here on a line is remembered (150 bytes each): every block inside it looks for its end."""


@dataclass(frozen=True)
class TextFormat:
    """What is read of a file.

    Args:
        is_jsonl: a row is a document; otherwise all text of a block is one.
        column: field of a row that holds the text.
        skips_bad: leave out a row that is no JSON or has no text there, with a line in the log.
    """

    is_jsonl: bool = False
    column: str = "text"
    skips_bad: bool = False


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
        text = _decode(content, block.path, start)
        return [text] if text.strip() else []
    texts: list[str] = []
    for offset, line in _lines(content, start):
        if line.strip():
            try:
                texts.append(_row_text(line, form.column, block.path, offset))
            except UserError as error:
                if not form.skips_bad:
                    raise
                logger.warning("skipped: %s", error)
    return [text for text in texts if text]


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


def _lines(content: bytes, start: int) -> Iterator[tuple[int, bytes]]:
    for line in io.BytesIO(content):
        yield start, line
        start += len(line)


def _decode(content: bytes, path: Path, start: int) -> str:
    try:
        return content.decode("utf-8-sig" if start == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: byte {start + error.start} is not UTF-8 text ({error.reason}): convert the "
            "file to UTF-8 or remove it"
        ) from error


def _row_text(line: bytes, column: str, path: Path, offset: int) -> str:
    decoded = _decode(line, path, offset)
    try:
        row = json.loads(decoded)
    # A number of thousands of digits is a plain ValueError.
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: the line at byte {offset} is not JSON ({error}): mend it, or set "
            "data.source.on_bad_row = 'skip'"
        ) from error
    if not isinstance(row, dict) or not isinstance(row.get(column), str):
        raise UserError(
            f"{path}: the row at byte {offset} has no text in {column!r} (found "
            f"{_found(row, column)}): name the "
            "field that has it in data.source.column, or set data.source.on_bad_row = 'skip'"
        )
    return _encodable(row[column], path, offset)


def _found(row: Any, column: str) -> str:
    """Return what stands where text should."""
    if not isinstance(row, dict):
        return f"a {type(row).__name__}"
    if column in row:
        return f"a {type(row[column]).__name__} there"
    return f"the fields {', '.join(row)}"


def _encodable(text: str, path: Path, offset: int) -> str:
    """Return the text; half of a surrogate pair, which JSON can spell, is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{path}: the row at byte {offset} has half a surrogate pair at character "
            f"{error.start} of its text: mend it, or set data.source.on_bad_row = 'skip'"
        ) from error
    return text
