"""Rows that a user's function makes.

Owns what such a function must return, checked where it is opened: a finite sequence that gives the
same row for the same index. What a row may hold is `rows.py`'s. `sources.py` opens these.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from trainer.config.data import FunctionSource
from trainer.data.rows import BadRow
from trainer.data.samples import row_digest
from trainer.errors import UserError
from trainer.user_function import FAILURES, check_arguments, describe_failure, load_function

NUM_WHOLE = 100_000
"""Longest list of which a fingerprint reads every row: about a second."""
NUM_COMPARED = 16
"""Rows, at least, that it reads of a longer one or of rows made on the fly, evenly spread."""


@runtime_checkable
class Indexable(Protocol):
    """A list, a tuple, a `datasets.Dataset`, or a class of the user's."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Return a row, from 0."""
        ...


class FunctionRows:
    """The rows of `module:function`, called once when the source is opened."""

    def __init__(self, config: FunctionSource, field: str) -> None:
        self._path = config.path
        function = load_function(config.path, f"{field}.path")
        check_arguments(function, 0, config.params, config.path, field)
        try:
            rows = function(**config.params)
        except FAILURES as error:
            raise UserError(
                f"{field}.path={config.path!r} failed ({describe_failure(error)}); mend the "
                "function or its params"
            ) from error
        self._rows = _checked(rows, f"{field}.path={config.path!r}")
        self._check_determinism(field)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Return a row.

        Raises:
            BadRow: it is no table of fields, or its making fails.
        """
        try:
            row = self._rows[index]
        # A class of the user's may make rows on the fly.
        except FAILURES as error:
            raise BadRow(
                "function_failed", f"{describe_failure(error)}: mend the function"
            ) from error
        if not isinstance(row, Mapping):
            raise BadRow("not_a_table", f"it is a {type(row).__name__}: give a dict of fields")
        return row

    def where(self, index: int) -> str:
        """Return the function and the index, from 0."""
        return f"{self._path}[{index}]"

    def fingerprint(self) -> str:
        """Return what tells these rows from others, or from the same in another order.

        It reads every row of a list or tuple of up to `NUM_WHOLE`, and 16 to 31 of anything else:
        making rows may take long.
        """
        hashed = hashlib.blake2b(str(len(self)).encode(), digest_size=16)
        is_whole = isinstance(self._rows, list | tuple) and len(self) <= NUM_WHOLE
        for index in range(0, len(self), 1 if is_whole else max(1, len(self) // NUM_COMPARED)):
            try:
                hashed.update(row_digest(self[index]))
            except BadRow as error:
                hashed.update(error.reason.encode())
        return hashed.hexdigest()

    def _check_determinism(self, field: str) -> None:
        try:
            first, again = row_digest(self[0]), row_digest(self[0])
        except BadRow:
            return  # `on_bad_row` decides what becomes of it.
        if first != again:
            raise UserError(
                f"{field}.path={self._path!r}: its row 0 is another each time it is read, and a "
                "resumed run or another rank would see other rows: make a row depend on its index "
                "alone (seed random numbers with it)"
            )


def _checked(rows: Any, name: str) -> Indexable:
    is_sequence = isinstance(rows, Indexable) and not isinstance(rows, str | bytes | Mapping)
    if not is_sequence:
        raise UserError(
            f"{name} returned a {type(rows).__name__}: return a list of rows, or an object with "
            "__len__ and __getitem__ (of an iterator, list(...))"
        )
    return rows
