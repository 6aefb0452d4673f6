import logging
import math
import sys
from asyncio import CancelledError
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.support.rollouts import make_sample
from trainer.errors import UserError
from trainer.rl.rewards import Reward
from trainer.rl.scoring import Scorer


def returning(value):
    return Reward("broken", 1.0, lambda sample: value)


def raising(sample):
    raise ZeroDivisionError("by zero")


def exiting(sample):
    sys.exit(0)


def cancelling(sample):
    raise CancelledError


BROKEN = {
    "raises": (Reward("broken", 1.0, raising), "ZeroDivisionError: by zero"),
    "exits": (Reward("broken", 1.0, exiting), "SystemExit: 0"),
    "cancels": (Reward("broken", 1.0, cancelling), "CancelledError"),
    "None": (returning(None), "None, not a number"),
    "text": (returning("1"), "'1', not a number"),
    "nan": (returning(math.nan), "nan, not a finite number"),
    "inf": (returning(math.inf), "inf, not a finite number"),
    "beyond fp32": (returning(-1e300), "-1e+300, not a finite number of at most 1e+30"),
    "a vector": (returning(torch.ones(1)), "tensor([1.]), not a number"),
    "a table": (returning({"score": 1.0}), "{'score': 1.0}, not a number"),
    "a nan in a tensor": (returning(torch.tensor(math.nan)), "tensor(nan), not a finite number"),
}


NUMBERS = [1, True, np.True_, np.float32(1), np.array(1), torch.tensor(1.0), Fraction(1)]


@pytest.mark.parametrize("value", [*NUMBERS, Decimal(1), torch.ones((), requires_grad=True)])
def test_numbers_of_every_library_count(value):
    score = Scorer([returning(value)], "broken", ends_run=True).score(make_sample("42"))
    assert (score.reward, type(score.reward), score.is_pass) == (1.0, float, True)


def test_a_weighted_sum_beyond_fp32_fails_like_a_reward(caplog):
    rewards = [Reward("large", 1e300, lambda s: 1e20), Reward("small", -1e300, lambda s: 1e20)]
    score = Scorer(rewards, "large", ends_run=False).score(make_sample("42"))
    assert (score.reward, score.num_errors) == (0.0, 1)
    assert "the weighted sum of rewards failed on prompts.jsonl:1 (ValueError: nan)" in caplog.text


def test_an_error_of_several_lines_is_told_in_one(caplog):
    def raising_lines(sample):
        raise ValueError("first\n  second")

    reward = Reward("broken", 1.0, raising_lines)
    Scorer([reward], "broken", ends_run=False).score(make_sample("42"))
    assert "(ValueError: first second)" in caplog.text


def test_several_rewards_are_weighted_and_kept_apart():
    rewards = [
        Reward("right", 1.0, lambda sample: 1),
        Reward("short", -0.5, lambda sample: np.float32(0.5)),
        Reward("polite", 2.0, lambda sample: True),
    ]
    score = Scorer(rewards, "right", ends_run=True).score(make_sample("42"))
    assert score.reward == 1.0 - 0.25 + 2.0
    assert score.parts == {"right": 1.0, "short": 0.5, "polite": 1.0}
    assert score.is_pass


@pytest.mark.parametrize(("value", "is_pass"), [(1.0, True), (0.99, True), (0.98, False)])
def test_only_a_full_score_of_the_deciding_reward_is_a_pass(value, is_pass):
    rewards = [Reward("shaped", 1.0, lambda sample: 5.0), Reward("right", 0.1, lambda s: value)]
    assert Scorer(rewards, "right", ends_run=True).score(make_sample("42")).is_pass == is_pass


@pytest.mark.parametrize(("reward", "cause"), BROKEN.values(), ids=BROKEN.keys())
def test_a_failing_reward_scores_zero_and_names_the_sample(reward, cause, caplog):
    other = Reward("other", 1.0, lambda sample: 0.25)
    score = Scorer([reward, other], "other", ends_run=False).score(make_sample("42"))
    assert (score.reward, score.parts["broken"], score.num_errors) == (0.25, 0.0, 1)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for part in ("'broken'", "prompts.jsonl:1", cause, "it is 42", "scores 0"):
        assert part in record.getMessage()


@pytest.mark.parametrize(("reward", "cause"), BROKEN.values(), ids=BROKEN.keys())
def test_a_failing_reward_ends_the_run_if_so_configured(reward, cause):
    with pytest.raises(UserError, match=r"prompts\.jsonl:1") as caught:
        Scorer([reward], "broken", ends_run=True).score(make_sample("42"))
    assert cause in str(caught.value)
    assert "env.on_reward_error = 'zero'" in str(caught.value)


def test_many_failures_are_counted_but_not_all_told(caplog):
    scorer = Scorer([returning(None)], "broken", ends_run=False)
    assert sum(scorer.score(make_sample("42")).num_errors for _ in range(50)) == 50
    assert len(caplog.records) == 11
