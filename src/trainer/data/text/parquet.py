"""Parquet files as pages, of which only the footers are read beforehand.

Owns the division into row groups. In memory lie the text column of one page's row groups and 32
bytes a row group.
"""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from trainer.data.text.pages import Cursor, Page, Shuffle
from trainer.data.text.settings import setting
from trainer.errors import UserError

PAGE_BYTES = 1 << 24
"""A page is as many row groups as hold about this much, at least one."""
NUM_READERS = 16


@dataclass(frozen=True)
class RowGroup:
    """One row group of a file."""

    path: Path
    index: int
    num_rows: int
    num_bytes: int


class ParquetPages:
    """Parquet files in pages of whole row groups.

    Args:
        paths: in order; not empty.
        column: that holds the text.
        shuffle: order of row groups, and of documents in a page.
        field: the source's name, for messages.

    Attributes:
        groups: all row groups, in order.
        num_bytes: of them, uncompressed.

    Raises:
        UserError: a file is not Parquet or lacks the column.
    """

    def __init__(
        self, paths: Sequence[Path], column: str, shuffle: Shuffle, field: str = "data.source"
    ) -> None:
        self._column = column
        self._shuffle = shuffle
        self.groups = read_row_groups(paths, column, field)
        self.num_bytes = sum(group.num_bytes for group in self.groups)
        self._page_groups = max(1, PAGE_BYTES * len(self.groups) // max(1, self.num_bytes))

    @property
    def identity(self) -> dict[str, Any]:
        """Number and sizes of the row groups."""
        sizes = "\n".join(f"{g.path.name} {g.num_rows} {g.num_bytes}" for g in self.groups)
        return {
            "row groups": len(self.groups),
            "rows": sum(group.num_rows for group in self.groups),
            "names and sizes": hashlib.blake2b(sizes.encode(), digest_size=16).hexdigest(),
        }

    @property
    def num_pages(self) -> int:
        """Pages of an epoch."""
        return -(-len(self.groups) // self._page_groups)

    def page(self, epoch: int, cursor: Cursor) -> Page:
        """Read the row groups of a page.

        Raises:
            UserError: a file is gone or damaged.
        """
        number, total = cursor[0], len(self.groups)
        start = number * self._page_groups
        stop = min(start + self._page_groups, total)
        texts: list[str] = []
        for index in range(start, stop):
            group = self.groups[self._shuffle.place(index, total, epoch)]
            texts += read_row_group(group, self._column)
        documents = self._shuffle.reorder(texts, epoch, number)
        return Page(documents, (number + 1,) if stop < total else None)

    def fraction(self, cursor: Cursor) -> float:
        """Return the part of the row groups before a cursor."""
        return min(1.0, cursor[0] * self._page_groups / len(self.groups))


def read_row_groups(paths: Sequence[Path], column: str, field: str) -> list[RowGroup]:
    """Read the footers of files.

    Raises:
        UserError: a file is not Parquet or lacks the column.
    """
    with ThreadPoolExecutor(NUM_READERS) as executor:
        by_file = executor.map(lambda path: _footer(path, column, field), paths)
        return [group for groups in by_file for group in groups]


def read_row_group(group: RowGroup, column: str) -> list[str]:
    """Return the texts of a row group; rows without text are left out.

    Raises:
        UserError: the file is gone, damaged or not UTF-8.
    """
    try:
        with pyarrow.parquet.ParquetFile(group.path) as file:
            table = file.read_row_group(group.index, columns=[column])
        return [text for text in table.column(column).to_pylist() if text]
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(group.path, error) from error


def _footer(path: Path, column: str, field: str) -> list[RowGroup]:
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error
    indices = schema.get_all_field_indices(column)
    if len(indices) != 1 or not _is_text(schema.field(indices[0]).type):
        columns = ", ".join(f"{each.name} ({each.type})" for each in schema)
        raise UserError(
            f"{path} needs one text column {column!r} (its columns are {columns}): name the column "
            f"that holds the text in {setting(field, 'column')}"
        )
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    return [RowGroup(path, i, g.num_rows, g.total_byte_size) for i, g in enumerate(groups)]


def _is_text(kind: pyarrow.DataType) -> bool:
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    types = pyarrow.types
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} is not a readable Parquet file ({error}): replace or restore it")
