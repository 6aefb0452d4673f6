"""A network of random weights learns what a reward asks for, with Muon and with AdamW."""

import json
from pathlib import Path

import pytest

from tests.support.rl_configs import PART_ASCII, rl_config
from tests.support.spawn import run_ranks

pytestmark = pytest.mark.distributed

OPTIMIZERS = {
    "muon": {"type": "muon", "lr": 0.01, "adamw_lr": 0.01, "ns_dtype": "float32"},
    "adamw": {"type": "adamw", "lr": 0.01},
}


def run_both(folder: str) -> None:
    from trainer.loops.rl import run_rl

    for name, optim in OPTIMIZERS.items():
        config = rl_config(
            Path(folder) / name,
            max_steps=25,
            optim=optim,
            env={"rewards": [PART_ASCII]},
            rollout={"num_prompts": 8, "num_samples": 8, "max_new_tokens": 8, "batch_size": 64},
            loss={"advantage": "std"},
            data={"micro_batch_size": 16},
            val={"num_prompts": 4},
        )
        run_rl(config)


def test_rewards_go_up(tmp_path):
    run_ranks(1, run_both, str(tmp_path), timeout_s=200)
    for name in OPTIMIZERS:
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        rewards = [json.loads(line)["reward/mean"] for line in lines]
        assert rewards[0] < 0.5, name
        assert sum(rewards[-3:]) / 3 > 0.8, (name, rewards)
        assert (tmp_path / name / "rewards.png").stat().st_size > 1000
