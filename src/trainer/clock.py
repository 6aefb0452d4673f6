"""Time and values of a step, taken on the device and read later, so that nothing waits.

On a GPU a mark is a CUDA event and a value is copied to pinned memory behind the kernels that make
it; on a CPU both are immediate. One class serves both: reading waits only for what is not done yet.
"""

import time

import torch
from torch import Tensor

Mark = float | torch.cuda.Event
"""A moment: seconds on a CPU, an event on a GPU."""


def take_mark(device: torch.device) -> Mark:
    """Return this moment on a device's current stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start: Mark, stop: Mark) -> float:
    """Return the seconds between two marks of one device; waits for the later one if need be."""
    if isinstance(start, torch.cuda.Event):
        assert isinstance(stop, torch.cuda.Event), "marks of one device are of one kind"
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3
    assert not isinstance(stop, torch.cuda.Event), "marks of one device are of one kind"
    return stop - start


class Clock:
    """Named marks on one device's timeline.

    Example:
        >>> clock = Clock(torch.device("cpu"))
        >>> clock.mark("start"); clock.mark("end")
        >>> clock.seconds("start", "end") >= 0
        True
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: dict[str, Mark] = {}

    def mark(self, name: str) -> None:
        """Note the moment the device reaches this point of its stream."""
        self._marks[name] = take_mark(self._device)

    def seconds(self, start: str, end: str) -> float:
        """Return the seconds between two marks; waits for the later one if need be."""
        return seconds_between(self._marks[start], self._marks[end])


class HostCopy:
    """A device tensor on its way to the host.

    Args:
        values: Any shape; read back in the same dtype.
    """

    def __init__(self, values: Tensor) -> None:
        self._event = None
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(values.device))
        else:
            self._host = values.clone()

    def read(self) -> Tensor:
        """Return the values on the host; waits for the copy if it is not done."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
