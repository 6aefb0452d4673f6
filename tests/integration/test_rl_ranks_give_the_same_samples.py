"""Three and four ranks, with and without ep, sample and earn what one process does."""

import json
from pathlib import Path

import pytest

from tests.support.rl_configs import PART_ASCII, rl_config
from tests.support.spawn import run_ranks

pytestmark = pytest.mark.distributed

SPLITS = {
    "4 shards, ep 2": {"dp_shard": 4, "ep": 2},
    "2 replicas of 2 shards, ep 2": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    "3 shards": {"dp_shard": 3},
}
# Five prompts over four ranks: some ranks have none of their own in a round.
CHANGES = {
    "max_steps": 2,
    "rollout": {"num_prompts": 5, "num_samples": 4, "max_new_tokens": 6, "batch_size": 8},
    "env": {"rewards": [PART_ASCII, {"type": "task"}]},
}


def run_split(folder: str, split: dict) -> None:
    from trainer.loops.rl import run_rl

    run_rl(rl_config(Path(folder), parallel=split, **CHANGES))


def read(folder: Path) -> tuple[list[dict], list[dict]]:
    """Return the rollouts of both steps and the metrics."""
    files = [folder / "rollouts" / f"step_{step}.jsonl" for step in (1, 2)]
    rollouts = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return rollouts, [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("single")
    run_ranks(1, run_split, str(folder), {})
    return read(folder)


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS.keys())
def test_samples_and_rewards_do_not_depend_on_ranks(single, tmp_path, split):
    world_size = split["dp_shard"] * split.get("dp_replicate", 1)
    run_ranks(world_size, run_split, str(tmp_path), split, timeout_s=240)
    expected, expected_metrics = single
    rollouts, metrics = read(tmp_path)
    assert len({rollout["reward"] for rollout in rollouts}) > 2
    for rollout, reference in zip(rollouts, expected, strict=True):
        for key in ("where", "prompt_ids", "ids", "reward", "scores", "advantage"):
            assert rollout[key] == reference[key], key
        # fp32 sums over other splits.
        assert rollout["log_probs"] == pytest.approx(reference["log_probs"], abs=2e-5)
    for line, reference in zip(metrics, expected_metrics, strict=True):
        for key in ("reward/mean", "entropy/mean", "loss/mean", "val/pass_rate_at_start"):
            assert line.get(key) == pytest.approx(reference.get(key), abs=2e-5), key
        # Other splits pad by other rows, which count nowhere.
        for key in ("loss/load_balancing", "max_vio/mean", "optim/grad_norm"):
            assert line[key] == pytest.approx(reference[key], abs=2e-5), key


def test_on_the_first_step_of_fresh_samples_the_ratio_is_one(single):
    _, metrics = single
    for line in metrics:
        assert line["rollout/off_policy_steps"] == 0
        assert line["rollout/weights_version"] == line["step"] - 1
        # fp32 rounding of log-probabilities near -5, with a cache and without.
        for name in ("ratio/min", "ratio/max", "ratio/mean", "ratio/sampler_mean"):
            assert line[name] == pytest.approx(1.0, abs=2e-5)
        assert line["mismatch_kl/mean"] == pytest.approx(0.0, abs=1e-9)
        assert line["clip_fraction"] == 0.0
