import pytest

from tests.support.rollouts import make_sample
from trainer.config.rl import ExactMatchReward, FunctionReward, MathVerifyReward, TaskReward
from trainer.errors import UserError
from trainer.rl.rewards import build_reward


def test_exact_match_ignores_space_around_and_case_only_if_asked():
    score = build_reward(ExactMatchReward()).score
    assert [score(make_sample(a, "Ab")) for a in (" Ab\n", "ab", "A b", None)] == [1, 0, 0, 0]
    assert build_reward(ExactMatchReward(ignore_case=True)).score(make_sample("aB", "Ab")) == 1


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("1/2", r"\frac{1}{2}", 1.0),
        (r"$\frac{2}{4}$", "0.5", 1.0),
        ("x + 1", "1 + x", 1.0),
        (r"\$18", "18", 1.0),
        (r"$\$18$", r"\$18.00", 1.0),
        ("0.51", "0.5", 0.0),
        ("no idea", "0.5", 0.0),
        (None, "0.5", 0.0),
    ],
)
def test_math_verify_compares_values(answer, reference, expected):
    assert build_reward(MathVerifyReward()).score(make_sample(answer, reference)) == expected


@pytest.mark.parametrize("reference", ["", "  "])
def test_a_reference_that_math_verify_cannot_read_is_a_failure(reference):
    with pytest.raises(ValueError, match="reads no value in the reference"):
        build_reward(MathVerifyReward()).score(make_sample("1", reference))


def test_task_rewards_are_the_task_s_own():
    sample = make_sample("4", score_task=lambda answer: 0.25 if answer == "4" else 0.0)
    reward = build_reward(TaskReward(weight=0.5))
    assert (reward.name, reward.weight, reward.score(sample)) == ("task", 0.5, 0.25)


def test_a_function_is_found_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "my_rewards_module.py").write_text(
        "def shorter(sample, limit):\n"
        "    return sample.row['difficulty'] * (len(sample.completion) < limit)\n"
    )
    monkeypatch.chdir(tmp_path)
    reward = build_reward(FunctionReward(path="my_rewards_module:shorter", params={"limit": 9}))
    assert reward.name == "shorter"
    assert reward.score(make_sample("4")) == 3


def test_params_that_the_function_does_not_take_are_refused(tmp_path, monkeypatch):
    (tmp_path / "my_strict_rewards.py").write_text("def score(sample, limit):\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"env\.rewards\.params=\{\}: .*missing .*'limit'"):
        build_reward(FunctionReward(path="my_strict_rewards:score"))
