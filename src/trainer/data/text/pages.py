"""How a source of documents is read: page by page, in an order that its position alone decides.

Owns the protocol between sources (`files.py`, `compressed.py`, `parquet.py`, `hub.py`,
`trainer.data.shards`) and their reader (`documents.py`). A page is what a source holds in memory at
once. A cursor says where a page begins; it is a few integers, and reaching it costs the same
anywhere, so a run resumes at a million pages as fast as at ten.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from trainer.data.order import permuted

Cursor = tuple[int, ...]
Content = str | np.ndarray
"""A document as text, or as token ids of any integer dtype."""


class Documents(Protocol):
    """The documents of a page: a list, or something that reads them when asked."""

    def __len__(self) -> int:
        """Return how many there are."""
        ...

    def __getitem__(self, index: int, /) -> Content:
        """Return one."""
        ...


@dataclass(frozen=True, eq=False)
class Page:
    """Documents in the order in which they are to be read.

    Args:
        documents: read lazily where the source can.
        following: of the next page; None at the end of the epoch.
    """

    documents: Documents
    following: Cursor | None


class PagedSource(Protocol):
    """One source of documents."""

    @property
    def identity(self) -> Any:
        """What must be equal for a cursor to mean the same, as JSON."""
        ...

    def page(self, epoch: int, cursor: Cursor) -> Page:
        """Return the page at a cursor; (0,) is the first of the epoch.

        Raises:
            UserError: the data are gone or not readable.
        """
        ...

    def fraction(self, cursor: Cursor) -> float:
        """Return which part of an epoch comes before a cursor, 0 to 1, without reading."""
        ...


class NumberedPages(PagedSource, Protocol):
    """A source of numbered parts, mostly single pages, that can be read alone.

    Part n begins at the cursor (n,); its pages, and no others, have cursors that begin with n.
    """

    @property
    def num_pages(self) -> int:
        """Parts of an epoch."""
        ...

    @property
    def num_bytes(self) -> int:
        """About how much text an epoch has."""
        ...


@dataclass(frozen=True)
class Shuffle:
    """The order of a source's parts: another one every epoch, or as they lie.

    Args:
        key: of seed and source; None: as they lie.
    """

    key: str | None

    def place(self, index: int, size: int, epoch: int, *labels: int) -> int:
        """Return which of `size` parts comes at `index`; O(1) in time and memory.

        Args:
            index: 0 <= index < size.
            size: number of parts.
            epoch: of the source.
            labels: tell apart what is shuffled within one epoch.
        """
        if self.key is None:
            return index
        return permuted(index, size, "/".join(map(str, (self.key, epoch, *labels))))

    def reorder(self, items: Sequence[Content], epoch: int, *labels: int) -> list[Content]:
        """Return the items of a page in the order of the epoch."""
        size = len(items)
        return [items[self.place(i, size, epoch, *labels)] for i in range(size)]
