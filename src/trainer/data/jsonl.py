"""Random access to the lines of a JSONL file without holding it in memory.

Owns the index of line starts (8 bytes a line). Does not look into the rows. `sources.py` uses it.
"""

import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.rows import BadRow

_CHUNK_BYTES = 1 << 26
_WHITE_SPACE = np.frombuffer(b" \t\r\n", dtype=np.uint8)


class JsonLines:
    """The rows of a JSONL file; blank lines are no rows.

    Args:
        path: a file of UTF-8 JSON objects, one a line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes = _map(path)
        self._starts = _line_starts(self._bytes)
        self._lines = _filled_lines(self._bytes, self._starts)
        """Indices of the lines that are not blank."""

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Return a row.

        Raises:
            BadRow: the line is not a JSON object.
        """
        line = self._lines[index]
        content = self._bytes[self._starts[line] : self._starts[line + 1]]
        try:
            row = json.loads(content.decode("utf-8-sig").rstrip())
        # Also a number of thousands of digits, and lists in lists by the thousand.
        except (ValueError, RecursionError) as error:
            raise BadRow(
                "not_json", f"the line is not JSON ({error}): mend it or remove it"
            ) from None
        if not isinstance(row, dict):
            raise BadRow(
                "not_json", f"the line holds a {type(row).__name__}: give one JSON object a line"
            )
        return row

    def where(self, index: int) -> str:
        """Return file and line (from 1) of a row."""
        return f"{self._path}:{self._lines[index] + 1}"


def _map(path: Path) -> mmap.mmap | bytes:
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _line_starts(content: mmap.mmap | bytes) -> np.ndarray:
    """Return where each line starts, and the end of the file; int64 [lines + 1]."""
    starts = [np.zeros(1, dtype=np.int64)]
    for begin in range(0, len(content), _CHUNK_BYTES):
        chunk = np.frombuffer(content[begin : begin + _CHUNK_BYTES], dtype=np.uint8)
        starts.append(np.flatnonzero(chunk == ord("\n")) + begin + 1)
    ends_in_newline = len(starts[-1]) > 0 and starts[-1][-1] == len(content)
    if not ends_in_newline:
        starts.append(np.asarray([len(content)], dtype=np.int64))
    return np.concatenate(starts)


def _filled_lines(content: mmap.mmap | bytes, starts: np.ndarray) -> np.ndarray:
    """Return the indices of the lines that hold more than white space; int64.

    Only lines that begin with white space are looked at whole.
    """
    filled = np.diff(starts) > 0
    if len(content):
        begin = np.frombuffer(content, dtype=np.uint8)[np.minimum(starts[:-1], len(content) - 1)]
        for line in np.flatnonzero(filled & np.isin(begin, _WHITE_SPACE)):
            filled[line] = bool(content[starts[line] : starts[line + 1]].strip())
    return np.flatnonzero(filled)
