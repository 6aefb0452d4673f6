import pytest

from trainer.rl.advantages import group_advantages

REWARDS = [1.0, 0.0, 0.0, 0.2]
"""Mean 0.3; squares about it 0.49 + 0.09 + 0.09 + 0.01 = 0.68."""


def test_mean_by_hand():
    assert group_advantages(REWARDS, "mean") == pytest.approx([0.7, -0.3, -0.3, -0.1])


def test_std_by_hand():
    std = (0.68 / 3) ** 0.5 + 1e-4
    expected = [0.7 / std, -0.3 / std, -0.3 / std, -0.1 / std]
    assert group_advantages(REWARDS, "std") == pytest.approx(expected)


def test_leave_one_out_by_hand():
    expected = [1 - 0.2 / 3, 0 - 1.2 / 3, 0 - 1.2 / 3, 0.2 - 1 / 3]
    assert group_advantages(REWARDS, "leave_one_out") == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["mean", "std", "leave_one_out"])
@pytest.mark.parametrize("value", [0.0, 0.1, 1.0 / 3])
def test_constant_groups_give_exactly_zero(kind, value):
    assert group_advantages([value] * 3, kind) == [0.0] * 3
