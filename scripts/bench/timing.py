"""One timing protocol for every benchmark: warm up by time, interleave variants, report the median.

Interleaving spreads clock changes and heat over all variants alike; each call gets another input,
so that nothing is found in the L2 cache by accident.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Variant = Callable[[int], object]


@dataclass(frozen=True)
class Timing:
    """Milliseconds a call: the median, and the spread between the quartiles."""

    median_ms: float
    spread_ms: float
    num_calls: int


def time_interleaved(
    variants: Mapping[str, Variant],
    device: torch.device,
    *,
    warm_up_s: float = 0.3,
    measure_s: float = 1.0,
    min_rounds: int = 5,
) -> dict[str, Timing]:
    """Time variants in turn, round after round.

    Args:
        variants: name -> function of the round's number (to rotate inputs).
        device: CUDA times by events, anything else by the clock.
        warm_up_s: seconds of calls before measuring, for each variant.
        measure_s: seconds of measuring, for all variants together.
        min_rounds: rounds at least, however long they take.
    """
    for variant in variants.values():
        _warm_up(variant, device, warm_up_s)
    samples: dict[str, list[float]] = {name: [] for name in variants}
    start = time.perf_counter()
    round_number = 0
    while round_number < min_rounds or time.perf_counter() - start < measure_s:
        for name, variant in variants.items():
            samples[name].append(_time_call(variant, round_number, device))
        round_number += 1
    return {name: _summarize(times_ms) for name, times_ms in samples.items()}


def _warm_up(variant: Variant, device: torch.device, seconds: float) -> None:
    start, call = time.perf_counter(), 0
    while call < 2 or time.perf_counter() - start < seconds:
        variant(call)
        _synchronize(device)
        call += 1


def _time_call(variant: Variant, round_number: int, device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        variant(round_number)
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    variant(round_number)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _summarize(times_ms: list[float]) -> Timing:
    low, median, high = statistics.quantiles(times_ms, n=4)
    return Timing(median, high - low, len(times_ms))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
