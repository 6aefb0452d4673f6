"""Rewards: functions from a completed sample to a score.

Owns the built-in scores, and the choice of one, a user's function included. What happens when one
fails is `scoring.py`'s, read next.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from trainer.config.rl import (
    ExactMatchReward,
    FunctionReward,
    MathVerifyReward,
    RewardConfig,
    TaskReward,
    reward_name,
)
from trainer.user_function import check_arguments, load_function


@dataclass(frozen=True)
class Sample:
    """A completion and what is known about its prompt: what every reward function is given.

    Attributes:
        question: The prompt for people: its last user turn, or the text.
        reference: The reference answer; empty if the row has none.
        completion: What the model wrote, special tokens left out.
        answer: What `env.answer` finds in it; None if nothing.
        row: The prompt's row as its source gives it.
        where: File and line, or task and item.
        score_task: The reasoning-gym task's own scoring; None for other sources.
        num_tokens: Of the completion, a stop token counted.
        is_truncated: Whether it ended for its length.
    """

    question: str
    reference: str
    completion: str
    answer: str | None
    row: Mapping[str, Any]
    where: str
    score_task: Callable[[str | None], float] | None = None
    num_tokens: int = 0
    is_truncated: bool = False


@dataclass(frozen=True)
class Reward:
    """A named score with its weight; `score` may raise or return anything if a user wrote it."""

    name: str
    weight: float
    score: Callable[[Sample], Any]


def build_reward(config: RewardConfig) -> Reward:
    """Return the reward that a config section asks for.

    Raises:
        UserError: a user's function cannot be imported, or does not take its params.
    """
    match config:
        case TaskReward():
            score = task_score
        case ExactMatchReward(ignore_case=ignore_case):
            score = partial(exact_match, ignore_case=ignore_case)
        case MathVerifyReward(timeout_s=timeout_s):
            score = partial(math_equal, timeout_s=timeout_s)
        case FunctionReward(path=path, params=params):
            function = load_function(path, "env.rewards.path")
            check_arguments(function, 1, params, path, "env.rewards")
            score = partial(function, **params)
    return Reward(reward_name(config), config.weight, score)


def task_score(sample: Sample) -> float:
    """Return the task's own score of the answer."""
    assert sample.score_task is not None, "the config lets this reward only meet tasks"
    return sample.score_task(sample.answer)


def exact_match(sample: Sample, *, ignore_case: bool = False) -> float:
    """Return 1.0 if answer and reference are the same text but for the space around them."""
    if sample.answer is None:
        return 0.0
    answer, reference = sample.answer.strip(), sample.reference.strip()
    if ignore_case:
        answer, reference = answer.casefold(), reference.casefold()
    return float(answer == reference)


def math_equal(sample: Sample, *, timeout_s: int) -> float:
    """Return 1.0 if math-verify takes the answer for the reference; LaTeX or plain.

    Raises:
        ValueError: it cannot read the reference, which no answer could then equal.
    """
    from math_verify import parse, verify

    reference = parse(as_math(sample.reference), parsing_timeout=timeout_s)
    if not reference:
        raise ValueError(f"math-verify reads no value in the reference {sample.reference!r}")
    if sample.answer is None:
        return 0.0
    answer = parse(as_math(sample.answer), parsing_timeout=timeout_s)
    return float(verify(reference, answer, timeout_seconds=timeout_s))


def as_math(text: str) -> str:
    r"""Put text in dollars unless it marks its mathematics itself: only marked LaTeX is parsed.

    A price (`\$5`) marks nothing.
    """
    is_marked = "$" in text.replace(r"\$", "") or r"\boxed" in text
    return text if is_marked else f"${text}$"
