import json

import pytest

from trainer.data.order import RowOrder, permuted


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000])
def test_permuted_is_a_permutation(size: int) -> None:
    assert sorted(permuted(i, size, "key") for i in range(size)) == list(range(size))


def test_keys_give_unrelated_permutations() -> None:
    orders = [[permuted(i, 500, key) for i in range(500)] for key in ("a", "b")]
    fixed = sum(x == y for x, y in zip(*orders, strict=True))
    # The number of agreements of two random permutations is Poisson with mean 1: P(> 8) < 1e-5.
    assert fixed <= 8


def test_permuted_is_pinned() -> None:
    """A change would break every resumed run."""
    assert [permuted(i, 10, "0/0/0") for i in range(10)] == [8, 0, 2, 5, 6, 7, 1, 9, 4, 3]


def rows_of(order: RowOrder, num_rows: int) -> list[tuple[int, int]]:
    rows = []
    for _ in range(num_rows):
        draw = order.draw(order.next_source())
        order.keep(draw.source)
        rows.append((draw.source, order.row(draw)))
    return rows


def test_each_epoch_gives_every_row_once_in_another_order() -> None:
    order = RowOrder([20], [1.0], seed=0, shuffle=True)
    first, second = rows_of(order, 20), rows_of(order, 20)
    assert sorted(first) == sorted(second) == [(0, i) for i in range(20)]
    assert first != second
    assert order.epochs == [2.0]


def test_without_shuffle_rows_come_as_they_lie() -> None:
    order = RowOrder([3], [1.0], seed=0, shuffle=False)
    assert [row for _, row in rows_of(order, 7)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(
    "weights",
    [[1, 1], [3, 1], [0.7, 0.2, 0.1], [5, 3, 2, 1, 1, 0.5], [1, 1, 8, 58, 58], [1e-9, 1]],
    ids=str,
)
def test_a_mix_keeps_its_proportions_at_every_moment(weights: list[float]) -> None:
    order = RowOrder([7] * len(weights), weights, seed=0, shuffle=True)
    counts = [0] * len(weights)
    for total, (source, _) in enumerate(rows_of(order, 2000), start=1):
        counts[source] += 1
        for count, weight in zip(counts, weights, strict=True):
            bound = 1 - 1 / max(2, 2 * len(weights) - 2)
            assert abs(count - total * weight / sum(weights)) < bound + 1e-9


def test_rows_that_are_not_kept_do_not_shift_the_proportions() -> None:
    order = RowOrder([1000, 1000], [1.0, 1.0], seed=0, shuffle=True)
    kept = [0, 0]
    for _ in range(200):
        source = order.next_source()
        order.draw(source)
        if source == 0:
            order.draw(source)  # as if the first row had been bad
        order.keep(source)
        kept[source] += 1
    assert kept == [100, 100]


def test_a_saved_position_continues_exactly_and_stays_small() -> None:
    order = RowOrder([11, 5], [2.0, 1.0], seed=3, shuffle=True)
    rows_of(order, 1234)
    state = json.loads(json.dumps(order.state_dict()))
    other = RowOrder([11, 5], [2.0, 1.0], seed=3, shuffle=True)
    other.load_state_dict(state)
    assert rows_of(other, 50) == rows_of(order, 50)
    assert len(json.dumps(state)) < 100
