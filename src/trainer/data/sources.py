"""Where rows come from: files, the hub, reasoning-gym tasks, functions.

Owns opening a `data.source` and reading one raw row of it at random. Checks no fields (`rows.py`)
and knows no order (`order.py`).
"""

import bisect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from trainer.config.data import (
    FilesSource,
    FunctionSource,
    HubSource,
    MixSource,
    ReasoningGymSource,
    SingleSource,
    Source,
)
from trainer.data.file_tree import existing, files_under
from trainer.data.function import FunctionRows
from trainer.data.jsonl import JsonLines
from trainer.data.order import permuted
from trainer.data.reasoning_gym import ReasoningGymRows
from trainer.data.rows import BadRow
from trainer.errors import UserError

_SUFFIXES = (".jsonl", ".parquet")


class Rows(Protocol):
    """Random access to raw rows."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Return a row; raises BadRow if it cannot be read."""
        ...

    def where(self, index: int) -> str:
        """Return what a person needs to find the row, such as file and line."""
        ...


class ChainedRows:
    """Several `Rows` one after another."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._ends = [0]
        for part in parts:
            self._ends.append(self._ends[-1] + len(part))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        part, inner = self._locate(index)
        return part[inner]

    def where(self, index: int) -> str:
        """Return where the row lies in its part."""
        part, inner = self._locate(index)
        return part.where(inner)

    def _locate(self, index: int) -> tuple[Rows, int]:
        part = bisect.bisect_right(self._ends, index) - 1
        return self._parts[part], index - self._ends[part]


class SplitRows:
    """A random part of `Rows`: ranks `start` to `stop` in a fixed permutation.

    The permutation does not depend on the run's seed: the same rows are held out in every run.
    """

    def __init__(self, rows: Rows, start: int, stop: int) -> None:
        self._rows = rows
        self._start = start
        self._stop = stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self._rows[self._locate(index)]

    def where(self, index: int) -> str:
        """Return where the row lies in the whole."""
        return self._rows.where(self._locate(index))

    def _locate(self, index: int) -> int:
        return permuted(self._start + index, len(self._rows), "split")


class TableRows:
    """Rows of a memory-mapped `datasets.Dataset`."""

    def __init__(self, table: Any, name: str) -> None:
        self._table = table
        self._name = name

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        try:
            return _without_nulls(self._table[index])
        except UnicodeDecodeError as error:
            raise BadRow("not_unicode", f"its text is not UTF-8 ({error}): mend it") from error

    def where(self, index: int) -> str:
        """Return the table's name and the row, from 1."""
        return f"{self._name}: row {index + 1}"


def single_sources(source: Source) -> tuple[SingleSource, ...]:
    """Return the sources of a mix, or the one source."""
    return source.sources if isinstance(source, MixSource) else (source,)


def open_sources(source: Source, field: str) -> tuple[Rows, ...]:
    """Open a source, or all sources of a mix.

    Args:
        source: from the config.
        field: the source's name there, for messages.

    Raises:
        UserError: one does not exist, cannot be read, or has no rows.
    """
    if isinstance(source, MixSource):
        parts = enumerate(source.sources)
        return tuple(open_rows(part, f"{field}.sources[{i}]") for i, part in parts)
    return (open_rows(source, field),)


def function_fingerprints(opened: Sequence[Rows]) -> dict[str, str]:
    """Return the fingerprints of the sources that a function makes, by their place, for JSON."""
    return {
        str(place): rows.fingerprint()
        for place, rows in enumerate(opened)
        if isinstance(rows, FunctionRows)
    }


def open_rows(source: SingleSource, field: str) -> Rows:
    """Open one source; arguments and errors as `open_sources`."""
    match source:
        case FilesSource():
            rows, name = _open_files(source, field), f"path={source.path!r}"
        case HubSource():
            rows, name = _open_hub(source, field), f"name={source.name!r}"
        case ReasoningGymSource():
            return ReasoningGymRows(source, field)
        case FunctionSource():
            rows, name = FunctionRows(source, field), f"path={source.path!r}"
    if len(rows) == 0:
        raise UserError(f"{field}.{name} has no rows: give a source with at least one")
    return rows


def _open_files(source: FilesSource, field: str) -> Rows:
    path = existing(source.path, f"{field}.path={source.path!r}")
    if path.is_dir():
        files, found = files_under(path, _SUFFIXES, field), "holds no such file"
    else:
        is_rows = path.suffix.lower() in _SUFFIXES and path.is_file()
        files, found = [path] if is_rows else [], "is of another kind"
    if not files:
        raise UserError(
            f"{field}.path={source.path!r} {found}: give a .jsonl or .parquet file, or a folder "
            "of them"
        )
    return ChainedRows([_open_file(file, field) for file in files])


def _open_file(path: Path, field: str) -> Rows:
    if path.suffix.lower() == ".parquet":
        return _open_parquet(path, field)
    try:
        return JsonLines(path)
    except OSError as error:
        raise UserError(
            f"{field}.path: {path} cannot be read ({error.strerror}): make it readable"
        ) from error


def _open_parquet(path: Path, field: str) -> Rows:
    import pyarrow
    import pyarrow.parquet
    from datasets.exceptions import DatasetsError

    try:
        if not pyarrow.parquet.read_metadata(path).num_rows:
            return ChainedRows([])
        table = _load_table("parquet", data_files=str(path), split="train")
    except (pyarrow.ArrowException, DatasetsError, OSError) as error:
        raise UserError(
            f"{field}.path: {path} is not a readable Parquet file ({error.__cause__ or error}): "
            "replace it"
        ) from error
    return TableRows(table, str(path))


def _open_hub(source: HubSource, field: str) -> Rows:
    from datasets.exceptions import DatasetsError

    try:
        table = _load_table(source.name, source.subset, split=source.split)
    except (OSError, ValueError, DatasetsError) as error:
        raise UserError(
            f"{field}.name={source.name!r} (subset={source.subset!r}, split={source.split!r}) "
            f"cannot be loaded ({error}): correct name, subset and split, check the network, or "
            f"write the data to Parquet and set {field}.type = 'files'"
        ) from error
    return TableRows(table, f"{source.name}[{source.split}]")


def _load_table(*args: Any, **kwargs: Any) -> Any:
    import datasets

    datasets.disable_progress_bars()
    return datasets.load_dataset(*args, **kwargs)


def _without_nulls(value: Any) -> Any:
    """Drop null fields at every level: Arrow writes one for each key that another row has."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
