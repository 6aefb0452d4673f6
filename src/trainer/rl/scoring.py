"""Scoring of samples: every reward of one sample, and what happens when a reward fails.

Owns the policy for failures and the weighted sum. The rewards are in `rewards.py`; groups are
compared in `advantages.py`.
"""

import logging
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
from torch import Tensor

from trainer.config.rl import PASS_SCORE, EnvConfig
from trainer.errors import UserError
from trainer.rl.rewards import Reward, Sample, build_reward
from trainer.user_function import FAILURES, describe_failure

logger = logging.getLogger(__name__)

NUM_WARNINGS = 10
"""Failures told in full; the rest is only counted."""
LARGEST = 1e30
"""Scores beyond it would leave fp32 in the loss."""


@dataclass(frozen=True)
class Score:
    """What a sample earned.

    Attributes:
        reward: The weighted sum.
        parts: Each reward's own score, by name, unweighted.
        is_pass: Whether the deciding reward gave its full score.
        num_errors: Rewards that failed.
    """

    reward: float
    parts: Mapping[str, float]
    is_pass: bool
    num_errors: int = 0


class Scorer:
    """Scores samples with the rewards of the environment.

    Args:
        rewards: At least one, names apart.
        pass_reward: Name of the one whose full score is a pass.
        ends_run: Whether a failing reward ends the run instead of scoring 0.
    """

    def __init__(self, rewards: Sequence[Reward], pass_reward: str, *, ends_run: bool) -> None:
        self._rewards = rewards
        self._pass_reward = pass_reward
        self._ends_run = ends_run
        self._num_warned = 0

    @classmethod
    def from_config(cls, config: EnvConfig) -> "Scorer":
        """Build the rewards of the `env` section."""
        return cls(
            [build_reward(reward) for reward in config.rewards],
            config.pass_reward or config.reward_names[0],
            ends_run=config.on_reward_error == "error",
        )

    def score(self, sample: Sample) -> Score:
        """Score one sample.

        Raises:
            UserError: a reward failed and failures end the run; names reward and sample.
        """
        parts, num_errors = {}, 0
        for reward in self._rewards:
            try:
                parts[reward.name] = as_number(reward.score(sample))
            except FAILURES as error:
                self._fail(f"reward {reward.name!r}", sample, error)
                parts[reward.name] = 0.0
                num_errors += 1
        total = sum(reward.weight * parts[reward.name] for reward in self._rewards)
        if not abs(total) <= LARGEST:
            self._fail("the weighted sum of rewards", sample, ValueError(f"{total!r}"))
            total, num_errors = 0.0, num_errors + 1
        is_pass = parts[self._pass_reward] >= PASS_SCORE
        return Score(total, parts, is_pass, num_errors)

    def _fail(self, reward: str, sample: Sample, error: BaseException) -> None:
        message = (
            f"{reward} failed on {sample.where} ({describe_failure(error)}); "
            f"completion {sample.completion[:80]!r}"
        )
        if self._ends_run:
            raise UserError(
                f"{message}; mend the reward, or score such samples 0 with "
                "env.on_reward_error = 'zero'"
            ) from error
        self._num_warned += 1
        if self._num_warned <= NUM_WARNINGS:
            logger.warning("%s; it scores 0", message)
        if self._num_warned == NUM_WARNINGS:
            logger.warning("further failing rewards are only counted, in reward/errors")


def as_number(value: Any) -> float:
    """Return a score as a float.

    Args:
        value: A number of Python or numpy, or a 0-d array or tensor; true and false are 1 and 0.

    Raises:
        TypeError: it is no number.
        ValueError: it is not finite, or beyond what advantages in fp32 can hold.
    """
    is_scalar_array = isinstance(value, np.generic | np.ndarray | Tensor) and value.ndim == 0
    number: Any = value.item() if is_scalar_array else value
    if not isinstance(number, numbers.Real | Decimal):
        raise TypeError(f"it returned {value!r:.80}, not a number")
    score = float(number)
    if not abs(score) <= LARGEST:
        raise ValueError(f"it returned {value!r:.80}, not a finite number of at most {LARGEST:g}")
    return score
