import pytest

from trainer.cli.planning.text import largest_fitting


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 8, 9, 100])
def test_largest_fitting_finds_the_limit(limit):
    assert largest_fitting(lambda number: number <= limit) == limit
