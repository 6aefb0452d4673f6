"""The documents of one source, endless, each with the place from which it can be read again.

Owns the position in a source: epoch, page, row. Leaves out held-out and empty documents. Read
`queue.py` next, which packs them.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.data.samples import sample
from trainer.data.text.pages import Content, Cursor, Page, PagedSource
from trainer.errors import UserError

FIRST: Cursor = (0,)


@dataclass(frozen=True)
class Place:
    """Where a document lies: its row of the page at a cursor of an epoch."""

    epoch: int = 0
    cursor: Cursor = FIRST
    row: int = 0

    def to_json(self) -> list[Any]:
        """Return it as a list."""
        return [self.epoch, list(self.cursor), self.row]

    @classmethod
    def from_json(cls, value: list[Any]) -> "Place":
        """Return what `to_json` was called on."""
        epoch, cursor, row = value
        return cls(epoch, tuple(cursor), row)


@dataclass(frozen=True)
class HashSplit:
    """Holds out a fraction of documents by their content: needs no scan, keeps copies together."""

    fraction: float

    def holds_out(self, content: Content) -> bool:
        """Return whether a document is one of those held out."""
        if not self.fraction:
            return False
        return int.from_bytes(_digest(content), "little") < self.fraction * 2**64


def _digest(content: Content) -> bytes:
    raw = content.encode() if isinstance(content, str) else content.tobytes()
    return hashlib.blake2b(raw, digest_size=8).digest()


class DocumentReader:
    """Reads a source from any place on, epoch after epoch.

    Args:
        source: read one page at a time.
        encode: a document to ids.
        field: the source's name in the config, for messages.
        purpose: what its documents are there for, for messages.
        keeps: which documents are read; the others are passed over.
        max_epochs: after as many the source is at its end; None: never.
    """

    def __init__(
        self,
        source: PagedSource,
        encode: Callable[[Content], np.ndarray],
        *,
        field: str = "data.source",
        purpose: str = "trained on",
        keeps: Callable[[Content], bool] = lambda content: True,
        max_epochs: int | None = None,
    ) -> None:
        self.identity = source.identity
        self._source = source
        self._encode = encode
        self.field = field
        self._purpose = purpose
        self._keeps = keeps
        self._max_epochs = max_epochs
        self._next = Place()
        self._gave_any = False
        """Whether this epoch had a document, as far as this process has read it."""
        self._page: tuple[int, Cursor, Page] | None = None

    @property
    def epochs(self) -> float:
        """How often the source has been gone through."""
        return self.epochs_at(self._next)

    def epochs_at(self, place: Place) -> float:
        """Return how often the source has been gone through once a place is reached."""
        return place.epoch + self._source.fraction(place.cursor)

    @property
    def is_at_end(self) -> bool:
        """Whether the last epoch is over."""
        return self._max_epochs is not None and self._next.epoch >= self._max_epochs

    def next(self) -> tuple[Place, np.ndarray] | None:
        """Return the next document's place and ids; None at the end of the last epoch.

        Raises:
            UserError: the source cannot be read, or a whole epoch has no document.
        """
        while not self.is_at_end:
            place = self._next
            page = self._page_of(place)
            if place.row == len(page.documents):
                self._turn_page(page)
                continue
            self._next = Place(place.epoch, place.cursor, place.row + 1)
            ids = self.read(place)
            if ids is not None:
                self._gave_any = True
                return place, ids
        return None

    def read(self, place: Place) -> np.ndarray | None:
        """Return the ids of the document at a place; None if it is passed over or too short.

        Raises:
            UserError: the source cannot be read, or has no such place any more.
        """
        documents = self._page_of(place).documents
        if place.row >= len(documents):
            raise UserError(
                f"{self.field}: epoch {place.epoch}, page {place.cursor} has {len(documents)} "
                f"documents, the checkpoint needs number {place.row + 1}: restore the data, or "
                "start a new run from the checkpoint's weights"
            )
        content = documents[place.row]
        if not self._keeps(content):
            return None
        ids = self._encode(content)
        return ids if len(ids) > 1 else None

    def sample(self) -> list[str]:
        """Return what tells the first page from that of other data; empty if it is not readable.

        Whether that is an error is decided when its documents' turn comes.
        """
        try:
            documents = self._page_of(Place()).documents
            return sample(len(documents), lambda row: _digest(documents[row]))
        except UserError:
            return []

    def state_dict(self) -> list[Any]:
        """Return the position, ready for JSON."""
        return self._next.to_json()

    def load_state_dict(self, state: list[Any]) -> None:
        """Go to a saved position; nothing is read."""
        self._next = Place.from_json(state)
        self._gave_any = True

    def _page_of(self, place: Place) -> Page:
        if self._page is None or self._page[:2] != (place.epoch, place.cursor):
            page = self._source.page(place.epoch, place.cursor)
            self._page = (place.epoch, place.cursor, page)
        return self._page[2]

    def _turn_page(self, page: Page) -> None:
        if page.following is not None:
            self._next = Place(self._next.epoch, page.following)
            return
        if not self._gave_any:
            raise UserError(
                f"{self.field}: a whole epoch has no document to be {self._purpose}: give a "
                "source with (more) text, or another val.fraction"
            )
        self._next, self._gave_any = Place(self._next.epoch + 1), False
