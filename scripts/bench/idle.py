"""How much of a step the device has nothing to do, from a profile of one step."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


class Launchable(Protocol):
    """Something with work to enqueue."""

    def launch(self) -> None:
        """Enqueue it without waiting."""
        ...


def measure_idle(step: Launchable, device: torch.device) -> float | None:
    """Return the share of a step's span in which no kernel, copy or fill runs; None on a CPU.

    The span runs from the first to the last of them, so what the host does before the first kernel
    is not in it.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step.launch()
        torch.cuda.synchronize(device)
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or []
        if event.device_type == DeviceType.CUDA
    ]
    return idle_share(spans)


def idle_share(spans: Iterable[tuple[float, float]]) -> float | None:
    """Return the part of the whole that no span covers; None without spans."""
    ordered = sorted(spans)
    if not ordered:
        return None
    busy, reached = 0.0, ordered[0][0]
    for start, stop in ordered:
        busy += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return 1.0 - busy / (reached - ordered[0][0])
