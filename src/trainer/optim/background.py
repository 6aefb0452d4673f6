"""A second stream, where elementwise passes run while the first one multiplies.

Owns the stream and the rule that makes it safe: at every tick each stream waits for what the other
was given in earlier ticks. So memory that one of them frees in a tick is not reused before the
other is done with it, and nothing needs to be kept alive by hand.
"""

from collections.abc import Generator
from contextlib import contextmanager

import torch

NUM_MULTIPROCESSORS = 12
"""Of 132 on an H200 that passes take while products run on the others."""


class Background:
    """Runs work beside the current stream; on a CPU, in its place."""

    def __init__(self, device: torch.device) -> None:
        # Of high priority: a product's threadblocks fill the device, so passes would otherwise
        # start when it ends.
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority=-1) if is_cuda else None

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
