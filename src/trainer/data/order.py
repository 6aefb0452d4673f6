"""In which order rows are drawn: a shuffle without memory, and exact proportions in a mix.

Owns the position in the data: counts per source, nothing else, so that resuming at a million costs
what resuming at ten costs. Whose turn it is in a mix is `mixture.py`'s. Knows no rows. Read
`stream.py` next.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer.data.mixture import Mixture

_NUM_ROUNDS = 6


@dataclass(frozen=True)
class Draw:
    """The `number`-th row drawn from a source since the start of the run."""

    source: int
    number: int


def permuted(index: int, size: int, key: str) -> int:
    """Return where a keyed permutation of `range(size)` sends `index`.

    A Feistel network over the next power of 4, walked until it lands inside the range: O(1) memory
    and time, and the same on every machine and version of every library.

    Args:
        index: 0 <= index < size.
        size: number of elements.
        key: another key gives another permutation.

    Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains (2002), cycle walking.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    while True:
        index = _feistel(index, half_bits, key)
        if index < size:
            return index


def _feistel(index: int, half_bits: int, key: str) -> int:
    mask = (1 << half_bits) - 1
    left, right = index >> half_bits, index & mask
    for round_index in range(_NUM_ROUNDS):
        digest = hashlib.blake2b(f"{key}/{round_index}/{right}".encode(), digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
    return (left << half_bits) | right


class RowOrder:
    """Says which source comes next, and which of its rows.

    After n rows that could be used, a source of share s has given n·s of them, to less than one row
    (`Mixture`). A row that is drawn and cannot be used (bad, overlong) is replaced from the same
    source, so that bad rows do not shift the proportions.

    Args:
        sizes: rows of each source.
        weights: relative share of each source; any positive scale.
        seed: of the shuffle; each epoch of each source has its own permutation.
        shuffle: False gives the rows as they lie.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool
    ) -> None:
        self._sizes = list(sizes)
        self._mixture = Mixture(weights)
        self._seed = seed
        self._shuffle = shuffle
        self._drawn = [0] * len(sizes)

    @property
    def epochs(self) -> list[float]:
        """How often each source has been gone through."""
        return [drawn / size for drawn, size in zip(self._drawn, self._sizes, strict=True)]

    def next_source(self) -> int:
        """Return the source whose turn it is."""
        return self._mixture.next_source()

    def draw(self, source: int) -> Draw:
        """Move on by one row of the source."""
        draw = Draw(source, self._drawn[source])
        self._drawn[source] += 1
        return draw

    def keep(self, source: int) -> None:
        """Count the last row drawn from the source as given."""
        self._mixture.give(source)

    def row(self, draw: Draw) -> int:
        """Return the row index that a draw stands for."""
        size = self._sizes[draw.source]
        epoch, position = divmod(draw.number, size)
        if not self._shuffle:
            return position
        return permuted(position, size, f"{self._seed}/{draw.source}/{epoch}")

    def state_dict(self) -> dict[str, Any]:
        """Return the position, ready for JSON."""
        return {"drawn": list(self._drawn), "kept": self._mixture.state_dict()["given"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position."""
        self._drawn = list(state["drawn"])
        self._mixture.load_state_dict({"given": state["kept"], "ended": [False] * len(self._sizes)})
