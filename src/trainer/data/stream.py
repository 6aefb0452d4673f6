"""The infinite stream of packs that a run trains on.

Owns the position: what was drawn from each source and the samples that wait for their pack. Every
rank runs the same stream and takes its packs with `packing.deal`, so the order of samples is the
same on any number of ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from trainer.config.data import DataConfig
from trainer.data.order import Draw, RowOrder
from trainer.data.packing import Document, Pack, take_best_fit
from trainer.data.reader import RowReader
from trainer.data.rows import BadRow
from trainer.data.samples import check_samples, row_digest, sample
from trainer.data.sources import Rows
from trainer.errors import UserError


@dataclass(frozen=True, eq=False)
class Pending:
    """A document (or the rest of one) that waits for its pack, and where it came from."""

    draw: Draw
    part: int
    start: int
    document: Document

    def __len__(self) -> int:
        return len(self.document)

    def rest(self, num_taken: int) -> "Pending":
        """Return what is left after the first `num_taken` positions."""
        document = self.document.piece(num_taken, len(self.document))
        return Pending(self.draw, self.part, self.start + num_taken, document)


class SFTStream:
    """An endless, deterministic stream of packs in one global order.

    Args:
        sources: rows of each source.
        weights: relative share of each source.
        reader: rows to documents.
        config: the `data` section.
        seed: of the shuffle.
        fingerprints: of the sources that a function makes, by their place.
    """

    def __init__(
        self,
        sources: Sequence[Rows],
        weights: Sequence[float],
        reader: RowReader,
        config: DataConfig,
        seed: int,
        fingerprints: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._sources = sources
        self._reader = reader
        self._config = config
        self._identity = {
            "rows in data.source": [len(rows) for rows in sources],
            "weights in data.source": list(weights),
            "seed": seed,
            "data.shuffle": config.shuffle,
            "questions held out by val": reader.num_excluded,
        }
        if fingerprints:
            self._identity["rows of functions in data.source"] = dict(fingerprints)
        # Making a function's rows may take long, and it has its fingerprint.
        self._samples = [
            [] if str(place) in fingerprints else _sample(rows)
            for place, rows in enumerate(sources)
        ]
        sizes = [len(rows) for rows in sources]
        self._order = RowOrder(sizes, weights, seed, config.shuffle)
        self._pending: list[Pending] = []

    @property
    def counts(self) -> dict[str, int]:
        """What was read and left out so far, by reason."""
        return dict(self._reader.counts)

    @property
    def epochs(self) -> list[float]:
        """How often each source has been gone through."""
        return self._order.epochs

    def next_packs(self, num_packs: int) -> list[Pack]:
        """Return the next packs of the global order.

        Raises:
            UserError: a row is bad or too long and the policy says error, or no row can be used.
        """
        return [self._next_pack() for _ in range(num_packs)]

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last pack, ready for JSON; its size does not grow."""
        return {
            "identity": dict(self._identity),
            "samples": self._samples,
            "order": self._order.state_dict(),
            "pending": [[p.draw.source, p.draw.number, p.part, p.start] for p in self._pending],
            "counts": self.counts,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position: the next packs are, bit for bit, those that would have followed.

        Raises:
            UserError: the state is of other data, another seed or another mix.
        """
        self._check_identity(state["identity"])
        check_samples(self._samples, state.get("samples", self._samples), "data.source")
        self._order.load_state_dict(state["order"])
        self._pending = [self._reread(*place) for place in state["pending"]]
        self._reader.counts.clear()
        self._reader.counts.update(state["counts"])

    def _check_identity(self, saved: dict[str, Any]) -> None:
        for key, value in self._identity.items():
            if saved.get(key) != value:
                raise UserError(
                    f"{key}: {value} in this run, {saved.get(key)} in the one that saved the "
                    "checkpoint, so its place in the data means nothing here: restore data, val "
                    "and seed, or start a new run from the checkpoint's weights"
                )

    def _next_pack(self) -> Pack:
        if self._config.split_samples:
            return self._next_full_pack()
        taken = take_best_fit(self._pending, self._refill, self._config.seq_len)
        return Pack(tuple(pending.document for pending in taken))

    def _next_full_pack(self) -> Pack:
        """Fill a pack to the brim, cutting the last document."""
        documents, space = [], self._config.seq_len
        while space:
            self._refill()
            first = self._pending.pop(0)
            if len(first) > space:
                self._pending.insert(0, first.rest(space))
            documents.append(first.document.piece(0, space))
            space -= len(documents[-1])
        return Pack(tuple(documents))

    def _refill(self) -> None:
        while len(self._pending) < self._config.pack_lookahead:
            self._draw_row(self._order.next_source())

    def _draw_row(self, source: int) -> None:
        """Add the next usable row of a source to what is pending."""
        # Any 2 n - 1 draws in a row hold a whole epoch, wherever they begin.
        for _ in range(2 * len(self._sources[source])):
            draw = self._order.draw(source)
            documents = self._documents(draw)
            if documents:
                self._order.keep(source)
                self._pending += [Pending(draw, i, 0, d) for i, d in enumerate(documents)]
                return
        name = f"data.source.sources[{source}]" if len(self._sources) > 1 else "data.source"
        raise UserError(
            f"{name}: none of its {len(self._sources[source])} rows can be used "
            f"({self._reader.left_out}): mend them, or give others"
        )

    def _documents(self, draw: Draw) -> list[Document]:
        rows = self._sources[draw.source]
        return self._reader.documents(rows, self._order.row(draw), draw.source)

    def _reread(self, source: int, number: int, part: int, start: int) -> Pending:
        draw = Draw(source, number)
        documents = self._documents(draw)
        if part >= len(documents) or start >= len(documents[part]):
            where = self._sources[source].where(self._order.row(draw))
            raise UserError(
                f"data: {where} no longer gives the sample that the checkpoint's half-built pack "
                "holds: restore the data and the data section, or start a new run from the "
                "checkpoint's weights"
            )
        return Pending(draw, part, start, documents[part].piece(start, len(documents[part])))


def _sample(rows: Rows) -> list[str]:
    def digest_of(index: int) -> bytes:
        try:
            return row_digest(rows[index])
        except BadRow as error:
            # What to do with it is decided when its turn comes.
            return row_digest({"bad": error.reason})

    return sample(len(rows), digest_of)
