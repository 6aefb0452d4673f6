"""Which source gives the next row or pack: exact proportions at every moment.

Source: Tijdeman, The chairman assignment problem (1980). Computed in fractions, so nothing drifts.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any


class Mixture:
    """Deals turns to sources by weight.

    After n turns, each of k sources of share s has had n·s of them to within 1 - 1/(2k - 2), which
    is less than one turn and the best that any rule can promise; `give` the turn to the
    `next_source`. Where a source ends, the same holds for the others from there on.

    Args:
        weights: relative shares, above 0.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = [Fraction(str(weight)) for weight in weights]
        self._given = [0] * len(weights)
        self._ended = [False] * len(weights)

    @property
    def active(self) -> list[int]:
        """Sources that have not ended."""
        return [index for index, ended in enumerate(self._ended) if not ended]

    def next_source(self) -> int:
        """Return whose turn it is; some source must be active."""
        active = self.active
        total = sum(self._weights[index] for index in active)
        turn = sum(self._given[index] for index in active) + 1
        slack = Fraction(1, max(2, 2 * len(active) - 2))
        lags = {i: self._weights[i] / total * turn - self._given[i] for i in active}
        urgent = [i for i in active if lags[i] >= slack] or active
        return min(urgent, key=lambda i: (1 - slack - lags[i]) / self._weights[i])

    def give(self, source: int) -> None:
        """Count a turn as given."""
        self._given[source] += 1

    def end(self, source: int) -> None:
        """Take a source out of the mix; the others go on in proportion from here."""
        self._ended[source] = True
        self._given = [0] * len(self._given)

    def resume(self, source: int) -> None:
        """Take a source that had ended back in; all go on in proportion from here."""
        self._ended[source] = False
        self._given = [0] * len(self._given)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, ready for JSON."""
        return {"given": list(self._given), "ended": list(self._ended)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position."""
        self._given, self._ended = list(state["given"]), list(state["ended"])
