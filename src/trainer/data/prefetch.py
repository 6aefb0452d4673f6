"""The next batch, prepared in a thread while the step runs.

Owns nothing but the running ahead: order and position are the stream's (`stream.py`). The state is
that behind the last batch handed out, never that behind the one in preparation.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from trainer.data.packing import Pack


class Stream(Protocol):
    """What can be prepared ahead; its state has `counts`."""

    @property
    def epochs(self) -> list[float]:
        """How often each source has been gone through."""
        ...

    def next_packs(self, num_packs: int) -> list[Pack]:
        """Return the next packs of the global order."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last pack."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position."""


class PrefetchedStream:
    """Hands out batches of a stream, one batch ahead.

    Args:
        stream: not to be used by anyone else.
        num_packs: packs of a batch (`data.batch_size`).
    """

    def __init__(self, stream: Stream, num_packs: int) -> None:
        self._stream = stream
        self._num_packs = num_packs
        self._state = stream.state_dict()
        self._epochs = stream.epochs
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="data")
        self._ahead: Future[tuple[list[Pack], dict[str, Any], list[float]]] | None = None

    @property
    def counts(self) -> dict[str, float]:
        """What was read and left out up to the last batch, by reason."""
        return dict(self._state["counts"])

    @property
    def epochs(self) -> list[float]:
        """How often each source had been gone through at the last batch."""
        return list(self._epochs)

    def next_packs(self, num_packs: int) -> list[Pack]:
        """Return the next batch; another size than that of the constructor is an error.

        Raises:
            UserError: as the stream's `next_packs`, when the batch's turn has come.
        """
        assert num_packs == self._num_packs, (num_packs, self._num_packs)
        ahead = self._ahead or self._executor.submit(self._prepare)
        packs, self._state, self._epochs = ahead.result()
        self._ahead = self._executor.submit(self._prepare)
        return packs

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last batch handed out."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position; what was prepared is thrown away."""
        if self._ahead is not None:
            self._ahead.exception()
            self._ahead = None
        self._stream.load_state_dict(state)
        self._state, self._epochs = self._stream.state_dict(), self._stream.epochs

    def _prepare(self) -> tuple[list[Pack], dict[str, Any], list[float]]:
        packs = self._stream.next_packs(self._num_packs)
        return packs, self._stream.state_dict(), self._stream.epochs
