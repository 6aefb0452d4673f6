"""The stream of packs that a run pretrains on: several sources in exact proportions.

Owns the whole position. Every rank runs the same stream and takes its packs with `packing.deal`,
so the order is the same on any number of ranks.
"""

from collections.abc import Sequence
from typing import Any

from trainer.data.mixture import Mixture
from trainer.data.packing import Pack
from trainer.data.samples import check_samples
from trainer.data.text.queue import PackQueue
from trainer.errors import UserError


class PretrainStream:
    """A deterministic stream of packs in one global order, each pack of one source.

    Args:
        queues: packs of each source.
        names: of the sources, for metrics.
        weights: relative share of each source, in packs.
        identity: what must be equal for a saved position to mean the same, by name.
    """

    def __init__(
        self,
        queues: Sequence[PackQueue],
        names: Sequence[str],
        weights: Sequence[float],
        identity: dict[str, Any],
    ) -> None:
        self._queues = list(queues)
        self._names = list(names)
        self._mixture = Mixture(weights)
        self._identity = {
            **identity,
            "weights in data.source": list(weights),
            "data.source": [queue.reader.identity for queue in queues],
        }
        self._samples = [queue.reader.sample() for queue in queues]
        self._num_packs = [0] * len(queues)

    @property
    def counts(self) -> dict[str, float]:
        """Packs given of each source so far, and how often it has been gone through."""
        packs = zip(self._names, self._num_packs, strict=True)
        epochs = zip(self._names, self.epochs, strict=True)
        return {f"packs/{name}": count for name, count in packs} | {
            f"epochs/{name}": count for name, count in epochs
        }

    @property
    def epochs(self) -> list[float]:
        """How often each source has been gone through."""
        return [queue.epochs for queue in self._queues]

    def next_packs(self, num_packs: int) -> list[Pack]:
        """Return the next packs of the global order.

        Raises:
            UserError: all sources have ended, or one cannot be read.
        """
        return [self._next_pack() for _ in range(num_packs)]

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last pack, ready for JSON; its size does not grow."""
        return {
            "identity": self._identity,
            "samples": self._samples,
            "mixture": self._mixture.state_dict(),
            "queues": [queue.state_dict() for queue in self._queues],
            "packs": list(self._num_packs),
            "counts": self.counts,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position: the next packs are, bit for bit, those that would have followed.

        A source that had ended is taken in again if it may now be gone through more often.

        Raises:
            UserError: the state is of other data, another seed or another mix.
        """
        for name, value in self._identity.items():
            if state["identity"].get(name) != value:
                raise UserError(
                    f"{name}: {value} in this run, {state['identity'].get(name)} in the one that "
                    "saved the checkpoint, so its place in the data means nothing here: restore "
                    "them, or start a new run from the checkpoint's weights"
                )
        check_samples(self._samples, state.get("samples", self._samples), "data.source")
        self._mixture.load_state_dict(state["mixture"])
        for queue, saved in zip(self._queues, state["queues"], strict=True):
            queue.load_state_dict(saved)
        for source, queue in enumerate(self._queues):
            if source not in self._mixture.active and not queue.reader.is_at_end:
                self._mixture.resume(source)
        self._num_packs = list(state["packs"])

    def _next_pack(self) -> Pack:
        while self._mixture.active:
            source = self._mixture.next_source()
            pack = self._queues[source].next_pack()
            if pack is not None:
                self._mixture.give(source)
                self._num_packs[source] += 1
                return pack
            self._mixture.end(source)
        raise UserError(
            f"data.source: every source has been gone through max_epochs times, after "
            f"{sum(self._num_packs):,} packs: lower max_steps, raise max_epochs or give more text"
        )
