"""A stream for memory-bound passes, so that they run beside the products of their neighbours.

Owns when the two streams wait for each other, and what must stay alive meanwhile. Elsewhere than on
a GPU there is one order of execution, and this does nothing.

Streams meet once a tick: the side stream starts when what the compute stream has launched so far is
done, and the compute stream goes on when the side stream's work of the tick before is done. So each
may read what the other wrote a tick ago, and memory freed on one is safe on the other a tick later.
"""

from collections.abc import Generator
from contextlib import contextmanager

import torch

_PRIORITY = -1
"""Above the compute stream's: a pass takes the multiprocessors that it is meant to have as soon as
the running product leaves them, not after all products launched before it."""


class SideStream:
    """Runs blocks of work beside the current stream."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority=_PRIORITY) if is_cuda else None
        self._last_work: torch.cuda.Event | None = None
        self._kept: list[object] = []
        self._kept_before: list[object] = []

    @contextmanager
    def work(self) -> Generator[None]:
        """Launch what is inside on the side stream; the current stream does not wait for it yet.

        The current stream waits for the side work of the call before.
        """
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        self.join()
        self._last_work = torch.cuda.Event()
        self._last_work.record(self._stream)
        self._kept_before, self._kept = self._kept, []

    def join(self) -> None:
        """Make the current stream wait for the side work launched before; let go of its data."""
        if self._last_work is not None:
            torch.cuda.current_stream().wait_event(self._last_work)
            self._last_work = None
        self._kept_before = []

    def keep(self, *data: object) -> None:
        """Keep what side work reads alive until the current stream has waited for that work."""
        if self._stream is not None:
            self._kept.extend(data)
