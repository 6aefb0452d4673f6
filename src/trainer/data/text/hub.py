"""Data sets of the hub as pages: downloaded and memory-mapped, or streamed.

Owns what differs between the two. A downloaded set is shuffled row by row over all of it. A stream
gives its files in shuffled order and shuffles within windows of rows; going back into the middle
of a file reads that file again up to there, whatever came before it.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from trainer.config.pretrain import HubTextSource
from trainer.data.text.pages import Cursor, Page, Shuffle
from trainer.data.text.settings import setting
from trainer.errors import UserError

PAGE_ROWS = 1024


class TablePages:
    """A memory-mapped `datasets.Dataset`, `PAGE_ROWS` rows at once.

    Args:
        table: the data set.
        column: that holds the text.
        shuffle: order of rows.
        field: the source's name, for messages.
    """

    def __init__(
        self, table: Any, column: str, shuffle: Shuffle, field: str = "data.source"
    ) -> None:
        self._field = field
        self._table = table
        self._column = column
        self._shuffle = shuffle

    @property
    def identity(self) -> dict[str, Any]:
        """Number of rows."""
        return {"rows": len(self._table)}

    @property
    def num_pages(self) -> int:
        """Pages of an epoch."""
        return -(-len(self._table) // PAGE_ROWS)

    @property
    def num_bytes(self) -> int:
        """Bytes of the table, all columns."""
        return self._table.data.nbytes

    def page(self, epoch: int, cursor: Cursor) -> Page:
        """Read the rows of a page.

        Raises:
            UserError: a row is not UTF-8.
        """
        number, total = cursor[0], len(self._table)
        stop = min((number + 1) * PAGE_ROWS, total)
        rows = [self._shuffle.place(i, total, epoch) for i in range(number * PAGE_ROWS, stop)]
        try:
            texts = [text for text in self._table[rows][self._column] if text]
        except UnicodeDecodeError as error:
            raise _unreadable(error, self._field) from error
        return Page(texts, (number + 1,) if stop < total else None)

    def fraction(self, cursor: Cursor) -> float:
        """Return the part of the rows before a cursor."""
        return min(1.0, cursor[0] * PAGE_ROWS / len(self._table))


class StreamPages:
    """A `datasets.IterableDataset`, `PAGE_ROWS` rows of one of its files at once.

    A cursor is (files before it, rows of its file before it); (0,) stands for (0, 0).

    Args:
        stream: the data set.
        column: that holds the text.
        shuffle: order of files, and of the rows of a page.
        field: the source's name, for messages.
    """

    def __init__(
        self, stream: Any, column: str, shuffle: Shuffle, field: str = "data.source"
    ) -> None:
        self._field = field
        self._stream = stream
        self._column = column
        self._shuffle = shuffle
        self._num_files = stream.num_shards
        self._open: tuple[int, Cursor, Iterator[str]] | None = None
        """Epoch and cursor at which the rows that follow are at hand."""

    @property
    def identity(self) -> dict[str, Any]:
        """Number of files."""
        return {"files": self._num_files}

    def page(self, epoch: int, cursor: Cursor) -> Page:
        """Read the next rows.

        Raises:
            UserError: a row has no such column, or its file cannot be read.
        """
        file, row = cursor if len(cursor) == 2 else (cursor[0], 0)
        rows = self._rows(epoch, (file, row))
        texts = _take(rows, PAGE_ROWS, self._field)
        following: Cursor | None
        if len(texts) == PAGE_ROWS:
            following = (file, row + PAGE_ROWS)
            self._open = (epoch, following, rows)
        else:
            following = (file + 1, 0) if file + 1 < self._num_files else None
            self._open = None
        kept = [text for text in texts if text]
        return Page(self._shuffle.reorder(kept, epoch, file, row), following)

    def fraction(self, cursor: Cursor) -> float:
        """Return the part of the files before a cursor."""
        return cursor[0] / self._num_files

    def _rows(self, epoch: int, cursor: Cursor) -> Iterator[str]:
        if self._open is not None and self._open[:2] == (epoch, cursor):
            return self._open[2]
        file, row = cursor
        index = self._shuffle.place(file, self._num_files, epoch)
        shard = self._stream.shard(num_shards=self._num_files, index=index)
        rows = shard.skip(row) if row else shard
        return (_text_of(item, self._column, self._field) for item in rows)


def open_hub(source: HubTextSource, field: str, shuffle: Shuffle) -> TablePages | StreamPages:
    """Open a data set of the hub.

    Args:
        source: from the config.
        field: its name there, for messages.
        shuffle: of this source.

    Raises:
        UserError: it cannot be loaded, has no such column, or no rows.
    """
    # Imported here: it takes a second, and most runs have no such source.
    import datasets
    import datasets.exceptions

    datasets.disable_progress_bars()
    try:
        loaded: Any = datasets.load_dataset(
            source.path, source.subset, split=source.split, streaming=source.streaming
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"{setting(field, 'path')}={source.path!r} (subset={source.subset!r}, "
            f"split={source.split!r}) cannot be loaded: {_reason(error)}"
        ) from error
    except StopIteration as error:
        raise _without_rows(source, field) from error
    _check_column(source, field, loaded.features)
    if source.streaming:
        return StreamPages(loaded, source.column, shuffle, field)
    if len(loaded) == 0:
        raise _without_rows(source, field)
    return TablePages(loaded, source.column, shuffle, field)


def _check_column(source: HubTextSource, field: str, features: Mapping[str, Any] | None) -> None:
    """Refuse a column that is not there or holds no text; a stream may not say what it has."""
    import datasets

    if features is None:
        return
    column = features.get(source.column)
    if not isinstance(column, datasets.Value) or column.dtype not in ("string", "large_string"):
        raise UserError(
            f"{setting(field, 'column')}={source.column!r} is no text column of {source.path} "
            f"(columns: {', '.join(features)}): name the one that holds the text"
        )


def _take(rows: Iterator[str], count: int, field: str) -> list[str]:
    import datasets.exceptions
    import pyarrow

    try:
        return list(islice(rows, count))
    except UserError:
        raise
    except (ValueError, pyarrow.ArrowException, datasets.exceptions.DatasetsError) as error:
        raise _unreadable(error, field) from error


def _without_rows(source: HubTextSource, field: str) -> UserError:
    path = setting(field, "path")
    return UserError(f"{path}={source.path!r} has no rows: give a source with some")


def _unreadable(error: Exception, field: str) -> UserError:
    return UserError(
        f"{field}: a file of the data set cannot be read ({_reason(error)}): mend the file, or "
        "give another source"
    )


def _reason(error: BaseException) -> str:
    """Return an error in words; the library's own often says only that there was one."""
    return f"{error} ({error.__cause__})" if error.__cause__ is not None else str(error)


def _text_of(row: Mapping[str, Any], column: str, field: str) -> str:
    """Return a row's text, '' for null."""
    text = row.get(column, False)
    if text is None:
        return ""
    if not isinstance(text, str):
        raise UserError(
            f"{setting(field, 'column')}={column!r}: a row of the stream has no text there (found "
            f"{', '.join(sorted(row))}): name the column that holds the text"
        )
    return text
