import json
from fractions import Fraction

import pytest

from trainer.data.text.mixture import Mixture


@pytest.mark.parametrize(
    "weights", [[1.0], [1, 1], [0.7, 0.2, 0.1], [5, 3, 2, 1, 1], [1e-3, 1], [0.1] * 7]
)
def test_shares_are_exact_at_every_moment_to_less_than_one_turn(weights):
    mixture = Mixture(weights)
    shares = [Fraction(str(weight)) for weight in weights]
    shares = [share / sum(shares) for share in shares]
    bound = 1 - Fraction(1, max(2, 2 * len(weights) - 2))
    given = [0] * len(weights)
    for turn in range(1, 1500):
        given[mixture.next_source()] += 1
        for share, count in zip(shares, given, strict=True):
            assert abs(count - share * turn) <= bound


def test_others_keep_their_proportions_when_a_source_ends():
    mixture = Mixture([1, 2, 3])
    for _ in range(10):
        mixture.next_source()
    mixture.end(1)
    given = [mixture.next_source() for _ in range(400)]
    assert (given.count(0), given.count(1), given.count(2)) == (100, 0, 300)
    assert mixture.active == [0, 2]


def test_a_saved_position_goes_on_alike():
    mixture, other = Mixture([1, 2, 3]), Mixture([1, 2, 3])
    for _ in range(17):
        mixture.next_source()
    mixture.end(0)
    other.load_state_dict(json.loads(json.dumps(mixture.state_dict())))
    assert [other.next_source() for _ in range(20)] == [mixture.next_source() for _ in range(20)]
