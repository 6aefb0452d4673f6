import json
from fractions import Fraction

import pytest

from trainer.data.mixture import Mixture


def give(mixture: Mixture, num_turns: int) -> list[int]:
    """Let as many turns be given; returns whose they were."""
    turns = []
    for _ in range(num_turns):
        turns.append(mixture.next_source())
        mixture.give(turns[-1])
    return turns


@pytest.mark.parametrize(
    "weights",
    [[1.0], [1, 1], [0.1, 0.9], [0.7, 0.2, 0.1], [5, 3, 2, 1, 1], [1e-3, 1], [1e-9, 3], [0.1] * 7],
    ids=str,
)
def test_shares_are_exact_at_every_moment_to_less_than_one_turn(weights):
    mixture = Mixture(weights)
    shares = [Fraction(str(weight)) for weight in weights]
    shares = [share / sum(shares) for share in shares]
    bound = 1 - Fraction(1, max(2, 2 * len(weights) - 2))
    given = [0] * len(weights)
    for turn, source in enumerate(give(mixture, 1500), start=1):
        given[source] += 1
        for share, count in zip(shares, given, strict=True):
            assert abs(count - share * turn) <= bound


def test_others_keep_their_proportions_when_a_source_ends():
    mixture = Mixture([1, 2, 3])
    give(mixture, 10)
    mixture.end(1)
    given = give(mixture, 400)
    assert (given.count(0), given.count(1), given.count(2)) == (100, 0, 300)
    assert mixture.active == [0, 2]


def test_a_saved_position_goes_on_alike():
    mixture, other = Mixture([1, 2, 3]), Mixture([1, 2, 3])
    give(mixture, 17)
    mixture.end(0)
    other.load_state_dict(json.loads(json.dumps(mixture.state_dict())))
    assert give(other, 20) == give(mixture, 20)
