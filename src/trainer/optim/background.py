"""A second stream, where elementwise passes run while the first one multiplies.

Owns the stream and the rule that makes it safe: at every tick each stream waits for what the other
was given in earlier ticks. Memory that one of them used is given back to the other's allocator as
the last thing in a tick, so it is not reused before that wait, and nothing is kept alive by hand.
"""

from collections.abc import Generator
from contextlib import contextmanager

import torch

NUM_MULTIPROCESSORS = 12
"""Of 132 on an H200 that passes take while products run on the others."""


class Background:
    """Runs work beside the current stream; on a CPU, in its place.

    Args:
        device: Where.
        num_multiprocessors: For passes beside a product; None: nothing runs beside anything.
    """

    def __init__(
        self, device: torch.device, num_multiprocessors: int | None = None
    ) -> None:
        self.num_multiprocessors = num_multiprocessors
        # Of high priority: a product's threadblocks fill the device, so passes would otherwise
        # start when it ends.
        has_stream = device.type == "cuda" and num_multiprocessors is not None
        self._stream = torch.cuda.Stream(device, priority=-1) if has_stream else None

    def tick(self) -> None:
        """Let each stream wait for all that the other has been given so far."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream()
        mark = current.record_event()
        current.wait_stream(self._stream)
        self._stream.wait_event(mark)

    @contextmanager
    def running(self) -> Generator[None]:
        """Give the background what is launched inside, its allocations too."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
