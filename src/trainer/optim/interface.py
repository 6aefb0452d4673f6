"""What a training loop asks of an optimizer, beside torch's own interface.

Owns the names. `gated.py` is ours, `dion.py` the adapter of another.
"""

from collections.abc import Callable

import torch
from torch import Tensor


class TrainerOptimizer(torch.optim.Optimizer):
    """A step under a flag, and times that are read later. Abstract."""

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Callable[[], float] | None = None, *, finite: Tensor | None = None
    ) -> float | None:
        """Update state and weights.

        Args:
            closure: Evaluates the model again and returns the loss.
            finite: 0-d bool on the device, equal on all ranks: False leaves weights, state and
                step counts as they are.
        """
        raise NotImplementedError

    def settle(self) -> bool:
        """Return whether the last step was applied; waits for its flag."""
        raise NotImplementedError

    def phase_times(self) -> Callable[[], dict[str, float]]:
        """Return a reader of the last step's `optim/<phase>_ms`; reading waits for the device."""
        raise NotImplementedError

    def timings(self) -> dict[str, float]:
        """Return the phases of the latest step that the device has finished, without a wait."""
        raise NotImplementedError
