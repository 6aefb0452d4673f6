"""Advantages: how much better a completion did than the others of its group."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

STD_EPSILON = 1e-4
"""Added to a group's standard deviation, as in TRL."""


def group_advantages(
    rewards: Sequence[float], kind: Literal["mean", "std", "leave_one_out"]
) -> list[float]:
    """Return each completion's advantage within one group.

    `mean`: r − mean. `std`: (r − mean) / (s + 1e-4), s the sample standard deviation (n − 1).
    `leave_one_out`: r − mean of the other n − 1, which is n / (n − 1) · (r − mean).

    Args:
        rewards: Of the n >= 2 completions of one prompt.
        kind: Which baseline and scale.

    Returns:
        fp64 values; exactly 0 for a constant group, which no rounding of the mean disturbs.

    Source: `mean` Dr. GRPO (arXiv 2503.20783), `std` GRPO (arXiv 2402.03300) with TRL's epsilon,
        `leave_one_out` RLOO (arXiv 2402.14740).
    """
    if is_constant(rewards):
        return [0.0] * len(rewards)
    values = np.asarray(rewards, dtype=np.float64)
    centred = values - values.mean()
    match kind:
        case "mean":
            advantages = centred
        case "std":
            advantages = centred / (values.std(ddof=1) + STD_EPSILON)
        case "leave_one_out":
            advantages = centred * len(values) / (len(values) - 1)
    return advantages.tolist()


def is_constant(rewards: Sequence[float]) -> bool:
    """Return whether a group's rewards are all equal, so that nothing is learnt from it."""
    return min(rewards) == max(rewards)
