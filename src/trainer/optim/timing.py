"""Times of the step's phases, read at a later step so that nothing waits for the device.

Owns the names of the metrics and which spans make them; moments are `trainer.clock`'s. Phases
overlap, so their sum may exceed the step.
"""

from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

from trainer.clock import Mark, seconds_between, take_mark

Phase = Literal["momentum", "newton_schulz", "exchange", "exchange_exposed", "update"]
PHASES: tuple[Phase, ...] = (
    "momentum",
    "newton_schulz",
    "exchange",
    "exchange_exposed",
    "update",
)

_MAX_PENDING_STEPS = 8


@dataclass
class StepTimes:
    """The spans of one step."""

    spans: list[tuple[Phase, Mark, Mark]] = field(default_factory=list)

    def is_past(self) -> bool:
        """Return whether the device has come to the end of every span."""
        return all(stop.query() for _, _, stop in self.spans if isinstance(stop, torch.cuda.Event))

    def read(self) -> dict[str, float]:
        """Return `optim/<phase>_ms`; waits for the device to finish the step."""
        totals = dict.fromkeys((f"optim/{phase}_ms" for phase in PHASES), 0.0)
        for phase, start, stop in self.spans:
            totals[f"optim/{phase}_ms"] += 1e3 * seconds_between(start, stop)
        return totals


class PhaseTimer:
    """Collects spans step by step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._current = StepTimes()
        self._pending: deque[StepTimes] = deque(maxlen=_MAX_PENDING_STEPS)
        self._latest: dict[str, float] = {}
        self.last_step = StepTimes()
        """The step that ended last."""

    def mark(self) -> Mark:
        """Return this moment on the current stream."""
        return take_mark(self._device)

    def add(self, phase: Phase, start: Mark, stop: Mark) -> None:
        """Count the time between two marks towards a phase of this step."""
        self._current.spans.append((phase, start, stop))

    @contextmanager
    def measure(self, phase: Phase) -> Generator[None]:
        """Count what runs inside towards a phase of this step."""
        start = self.mark()
        yield
        self.add(phase, start, self.mark())

    def end_step(self) -> None:
        """Close the step's books."""
        self.last_step, self._current = self._current, StepTimes()
        self._pending.append(self.last_step)

    def timings(self) -> dict[str, float]:
        """Return `optim/<phase>_ms` of the latest step that the device has finished; no wait."""
        while self._pending and self._pending[0].is_past():
            self._latest = self._pending.popleft().read()
        return dict(self._latest)
