"""The packs of one source: documents laid end to end, or fitted whole.

Owns the documents that are open and take turns. Knows no other source; `stream.py`, read next,
mixes.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.config.pretrain import PretrainDataConfig
from trainer.data.packing import MASKED, Document, Pack, take_best_fit
from trainer.data.text.documents import DocumentReader, Place
from trainer.errors import UserError


@dataclass(frozen=True, eq=False)
class Piece:
    """Positions `start:stop` of a document that are in no pack yet.

    Args:
        place: of the document.
        ids: of the whole document, any integer dtype.
        start: first position.
        stop: behind the last position.
        source: index of the source in the mix.
    """

    place: Place
    ids: np.ndarray
    start: int
    stop: int
    source: int

    def __len__(self) -> int:
        return self.stop - self.start

    def document(self) -> Document:
        """Return it with targets: the last position predicts the token behind it, if any."""
        ids = self.ids[self.start : self.stop + 1].astype(np.int64)
        targets = np.full(len(self), MASKED, dtype=np.int64)
        targets[: len(ids) - 1] = ids[1:]
        weights = (targets != MASKED).astype(np.float32)
        return Document(ids[: len(self)], targets, weights, self.source)

    def is_again(self, other: "Piece") -> bool:
        """Return whether it is of the same document as another, an epoch later."""
        is_later = self.place.epoch > other.place.epoch
        return is_later and np.array_equal(self.ids, other.ids)

    def to_json(self) -> list[Any]:
        """Return where it lies."""
        return [*self.place.to_json(), self.start, self.stop]

    def until(self, stop: int) -> "Piece":
        """Return the part before a position."""
        return Piece(self.place, self.ids, self.start, stop, self.source)

    def after(self, start: int) -> "Piece":
        """Return the part from a position on."""
        return Piece(self.place, self.ids, start, self.stop, self.source)


class PackQueue:
    """Packs one source.

    `pack_lookahead` documents are open at once and take turns, so that the packs of a step are not
    all of one long document. None is open twice: of a source of few documents the next epoch's turn
    comes with the end of this one's.

    Args:
        reader: of the source.
        config: the `data` section.
        source: index of the source in the mix.
    """

    def __init__(self, reader: DocumentReader, config: PretrainDataConfig, source: int = 0) -> None:
        self.reader = reader
        self._config = config
        self._source = source
        self._open: list[Piece] = []
        self._rest: Piece | None = None
        """Of a document whose pieces are more than may be open at once, or which is open still."""

    @property
    def epochs(self) -> float:
        """How often the source has been gone through, what is open not counted."""
        waiting = [*self._open, self._rest] if self._rest else self._open
        return min(
            (self.reader.epochs_at(piece.place) for piece in waiting), default=self.reader.epochs
        )

    def next_pack(self) -> Pack | None:
        """Return the next pack; the last of a source that ends may be partly empty, then None.

        Raises:
            UserError: the source cannot be read.
        """
        pieces = self._fill() if self._config.split_documents else self._fit()
        documents = tuple(piece.document() for piece in pieces)
        if not documents:
            return None
        return Pack((_merge(documents),) if self._config.attend_across_documents else documents)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, ready for JSON; as long for a million packs as for ten."""
        rest = None if self._rest is None else self._rest.to_json()
        pieces = [piece.to_json() for piece in self._open]
        return {"reader": self.reader.state_dict(), "open": pieces, "rest": rest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position, reading again what was open.

        Raises:
            UserError: that is no longer there.
        """
        self.reader.load_state_dict(state["reader"])
        rest = state.get("rest")
        saved = list(enumerate([*state["open"], rest] if rest else state["open"]))
        # Page by page: documents of one page may stand anywhere in the queue.
        saved.sort(key=lambda entry: (entry[1][0], entry[1][1]))
        read = {index: self._reread(*entry) for index, entry in saved}
        self._open = [read[index] for index in range(len(state["open"]))]
        self._rest = read.get(len(state["open"]))

    def _fill(self) -> list[Piece]:
        """Fill a pack to the brim; what is left of the last document goes to the end of the queue.

        A document's parts come in their order, since only its first part is ever taken.
        """
        taken: list[Piece] = []
        space = self._config.seq_len
        while space:
            self._refill()
            if not self._open:
                break
            piece = self._open.pop(0)
            stop = min(piece.stop, piece.start + space)
            taken.append(piece.until(stop))
            space -= len(taken[-1])
            if stop < piece.stop:
                self._open.append(piece.after(stop))
        return taken

    def _fit(self) -> list[Piece]:
        return take_best_fit(self._open, self._refill, self._config.seq_len)

    def _refill(self) -> None:
        while len(self._open) < self._config.pack_lookahead:
            piece = self._rest or self._draw()
            if piece is None:
                return
            if self._config.split_documents and any(map(piece.is_again, self._open)):
                self._rest = piece
                return
            num_tokens = len(piece) if self._config.split_documents else self._config.seq_len
            stop = min(piece.start + num_tokens, piece.stop)
            self._open.append(piece.until(stop))
            self._rest = piece.after(stop) if stop < piece.stop else None

    def _draw(self) -> Piece | None:
        """Return the next document as one piece; None at the end of the source."""
        drawn = self.reader.next()
        if drawn is None:
            return None
        place, ids = drawn
        return Piece(place, ids, 0, len(ids), self._source)

    def _reread(self, epoch: int, cursor: list[int], row: int, start: int, stop: int) -> Piece:
        place = Place.from_json([epoch, cursor, row])
        ids = self.reader.read(place)
        if ids is None or len(ids) < stop:
            raise UserError(
                f"{self.reader.field}: epoch {epoch}, page {cursor}, document {row} is not what it "
                "was when the checkpoint was saved: restore the data, or start a new run from its "
                "weights"
            )
        return Piece(place, ids, start, stop, self._source)


def _merge(documents: tuple[Document, ...]) -> Document:
    """Make one document of several; none's last token predicts the next one's first."""
    return Document(
        np.concatenate([document.ids for document in documents]),
        np.concatenate([document.targets for document in documents]),
        np.concatenate([document.weights for document in documents]),
        documents[0].source,
    )
