import pytest

from trainer.loops.due import is_due


@pytest.mark.parametrize(
    ("interval", "steps"),
    [(0, [7]), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6, 7]), (7, [7]), (100, [7])],
    ids=["only at the end", "always", "every third", "at the end once", "longer than the run"],
)
def test_it_is_due_every_interval_and_at_the_end(interval: int, steps: list[int]) -> None:
    assert [step for step in range(8) if is_due(interval, step, 7)] == steps
