"""Follows a CPU's allocator: how much a function allocates at most, and how much it leaves."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile

_TRANSPORT = ("gloo:", "c10d::")
"""Who allocates buffers that NCCL has not."""


@dataclass(frozen=True)
class Allocated:
    """Bytes of what is allocated meanwhile, apart from gloo's own buffers.

    Attributes:
        peak: At most, while the function ran.
        left: When it returned.
    """

    peak: int
    left: int


def allocated(function: Callable[[], Any]) -> Allocated:
    """Return what a function allocates for tensors on the CPU, its result kept."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    assert profiler.profiler is not None
    roots: Any = profiler.profiler.kineto_results.experimental_event_tree()
    # By address: what others allocated may be freed here, and the other way round.
    living: dict[int, int] = {}
    now = peak = 0
    for _, size, address in sorted(_allocations(roots)):
        if size > 0:
            living[address] = size
            now += size
        else:
            now -= living.pop(address, 0)
        peak = max(peak, now)
    del result
    return Allocated(peak, now)


def _allocations(
    events: list[Any], *, is_transport: bool = False
) -> Iterator[tuple[int, int, int]]:
    """Yield (time, bytes, address): bytes are negative where memory is freed."""
    for event in events:
        is_inside = is_transport or event.name.startswith(_TRANSPORT)
        if event.tag.name == "Allocation":
            size = event.extra_fields.alloc_size
            if size < 0 or not is_transport:
                yield event.start_time_ns, size, event.extra_fields.ptr
        yield from _allocations(event.children, is_transport=is_inside)
