"""Invariant 1: the same numbers however a run is sharded, for every optimizer, over ten steps."""

import numpy as np
import pytest

from tests.support.spawn import run_ranks
from tests.support.training import NUM_STEPS, OPTIMIZERS, SKIPPED_STEP, train_all

SPLITS = {
    2: [dict(dp_shard=2), dict(dp_shard=2, ep=2), dict(dp_replicate=2, dp_shard=1)],
    4: [
        dict(dp_shard=4),
        dict(dp_shard=4, ep=2),
        dict(dp_shard=4, ep=4),
        dict(dp_replicate=2, dp_shard=2),
        dict(dp_replicate=2, dp_shard=2, ep=2),
        dict(dp_replicate=4, dp_shard=1),
    ],
}


@pytest.fixture(scope="module")
def single():
    return run_ranks(1, train_all, [{}])[0]


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_split_gives_the_numbers_of_one_process(world_size, single):
    results = run_ranks(world_size, train_all, SPLITS[world_size], timeout_s=240)[0]
    assert len(results) == len(SPLITS[world_size]) * len(OPTIMIZERS)
    for (split, name), (values, weights, progress) in results.items():
        expected_values, expected_weights, expected_progress = single[str({}), name]
        case = f"{name} on {split}"
        finite = np.arange(NUM_STEPS) != SKIPPED_STEP
        # Sums of fp32 associate otherwise on other splits; 1e-5 is the design's bound.
        np.testing.assert_allclose(
            values[finite], expected_values[finite], rtol=1e-5, atol=1e-7, err_msg=case
        )
        assert progress == expected_progress, case
        assert (progress.num_skipped, progress.num_applied) == (1, NUM_STEPS - 1), case
        for parameter, expected in expected_weights.items():
            error = np.linalg.norm(weights[parameter] - expected) / np.linalg.norm(expected)
            assert error < 1e-5, f"{case}: {parameter} differs by {error:.1e}"


@pytest.mark.distributed
def test_training_moves_the_weights_of_every_parameter(single):
    _, adamw, _ = single[str({}), "adamw"]
    _, muon, _ = single[str({}), "muon"]
    same = [name for name in adamw if np.array_equal(adamw[name], muon[name])]
    assert not same
