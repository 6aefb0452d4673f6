"""Scoring of samples: every reward of one sample, and what happens when a reward fails.

Owns the policy for failures and the weighted sum. The rewards are in `rewards.py`; groups are
compared in `advantages.py`.
"""

import logging
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config.rl import PASS_SCORE, EnvConfig
from trainer.errors import UserError
from trainer.rl.rewards import Reward, Sample, build_reward

logger = logging.getLogger(__name__)

NUM_WARNINGS = 10
"""Failures told in full; the rest is only counted."""


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
            # A user's function may raise anything; interrupts and exits are no Exceptions.
            except Exception as error:
                self._fail(reward, sample, error)
                parts[reward.name] = 0.0
                num_errors += 1
        total = sum(reward.weight * parts[reward.name] for reward in self._rewards)
        is_pass = parts[self._pass_reward] >= PASS_SCORE
        return Score(total, parts, is_pass, num_errors)

    def _fail(self, reward: Reward, sample: Sample, error: Exception) -> None:
        message = (
            f"reward {reward.name!r} failed on {sample.where} ({type(error).__name__}: {error}); "
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

    Raises:
        TypeError: it is no number (true and false count as 1 and 0).
        ValueError: it is not finite.
    """
    if not isinstance(value, numbers.Real):
        raise TypeError(f"it returned {value!r}, not a number")
    if not math.isfinite(value):
        raise ValueError(f"it returned {value!r}, not a finite number")
    return float(value)
