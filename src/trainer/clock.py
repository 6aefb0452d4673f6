"""Time and values of a step, taken on the device and read later, so that nothing waits.

On a GPU a mark is a CUDA event and a value is copied to pinned memory behind the kernels that make
it; on a CPU both are immediate. One class serves both: reading waits only for what is not done yet.
"""

import time

import torch
from torch import Tensor


class Clock:
    """Named marks on one device's timeline.

    Example:
        >>> clock = Clock(torch.device("cpu"))
        >>> clock.mark("start"); clock.mark("end")
        >>> clock.seconds("start", "end") >= 0
        True
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: dict[str, float] = {}
        self._events: dict[str, torch.cuda.Event] = {}

    def mark(self, name: str) -> None:
        """Note the moment the device reaches this point of its stream."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events[name] = event
        else:
            self._marks[name] = time.perf_counter()

    def seconds(self, start: str, end: str) -> float:
        """Return the seconds between two marks; waits for the later one if need be."""
        if self._on_gpu:
            self._events[end].synchronize()
            return self._events[start].elapsed_time(self._events[end]) / 1e3
        return self._marks[end] - self._marks[start]


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
            self._event.record()
        else:
            self._host = values.clone()

    def read(self) -> Tensor:
        """Return the values on the host; waits for the copy if it is not done."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
