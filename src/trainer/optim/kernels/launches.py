"""How often each kernel was launched: the proof that the kernel asked for is the one that ran.

Owns one process-wide counter. The kernels record; tests, benchmarks and the routing table read.
"""

from collections import Counter

_launches: Counter[str] = Counter()


def record_launch(kernel: str) -> None:
    """Count one launch of `kernel` (`package.function`), where the call is made."""
    _launches[kernel] += 1


def launch_counts() -> dict[str, int]:
    """Return the launches since the start of the process or the last reset, by kernel."""
    return dict(_launches)


def reset_launch_counts() -> None:
    """Set every count to zero."""
    _launches.clear()
