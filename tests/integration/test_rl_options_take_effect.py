"""Every loss and every policy for samples runs on two ranks, and shows in the metrics."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.networks import dense_architecture
from tests.support.rl_configs import PART_ASCII, rl_config
from tests.support.spawn import run_ranks

pytestmark = pytest.mark.distributed

VARIANTS: dict[str, dict[str, Any]] = {
    "cispo": {"loss": {"type": "cispo", "advantage": "leave_one_out"}},
    "gspo by sequence": {"loss": {"type": "gspo", "reduction": "sequence"}},
    "importance masked": {"loss": {"importance": "mask", "importance_low": 2.0}},
    "importance truncated": {"loss": {"importance": "truncate", "old_log_probs": "trainer"}},
    "all truncated and masked": {"rollout": {"truncated": "mask", "max_new_tokens": 2}},
    "resampled": {"env": {"rewards": [{"type": "exact_match"}]}, "rollout": {"resample": 2}},
    "entropy bonus": {"loss": {"entropy_coef": 0.1}},
    "adamw": {"optim": {"type": "adamw", "lr": 0.001}},
    "a dense network": {"model": {"architecture": dense_architecture(vocab_size=320)}},
}


DIFFERING = {
    "other rows": {"source": {"type": "function", "path": f"{__name__}:rows_by_rank"}},
    "other rows made on the fly": {
        "source": {"type": "function", "path": f"{__name__}:odd_rows_by_rank"}
    },
    "more rows": {"source": {"type": "function", "path": f"{__name__}:num_rows_by_rank"}},
    "a reward that fails": {
        "rewards": [{"type": "function", "path": f"{__name__}:failing_on_rank_1"}],
        "on_reward_error": "error",
    },
}
"""Environments that are not the same on both ranks: neither may wait for the other."""


def rows_by_rank() -> list[dict[str, Any]]:
    first = int(os.environ["RANK"])
    return [{"question": f"{i + first}?", "answer": 1} for i in range(20)]


class OddRowsByRank:
    """Differs between ranks where a fingerprint does not read."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"question": f"{index}? {index % 2 and os.environ['RANK']}", "answer": 1}


def odd_rows_by_rank() -> OddRowsByRank:
    return OddRowsByRank()


def num_rows_by_rank() -> list[dict[str, Any]]:
    return [{"question": f"{i}?", "answer": 1} for i in range(20 + 5 * int(os.environ["RANK"]))]


def failing_on_rank_1(sample: Any) -> float:
    return 1 / (1 - int(os.environ["RANK"]))


def run_differing(folder: str) -> list[str]:
    from trainer.errors import UserError
    from trainer.loops.rl import run_rl
    from trainer.parallel import world

    world.close_world = lambda: None
    messages = []
    for name, changes in DIFFERING.items():
        env = {"rewards": [PART_ASCII]} | changes
        with pytest.raises(UserError) as caught:
            run_rl(rl_config(Path(folder) / name, env=env, val={"source": None, "fraction": 0.2}))
        messages.append(str(caught.value))
    return messages


def run_variants(folder: str) -> None:
    from trainer.loops.rl import run_rl
    from trainer.parallel import world

    # One process group serves all runs of this process.
    world.close_world = lambda: None
    for name, changes in VARIANTS.items():
        defaults = {"env": {"rewards": [PART_ASCII]}, "val": {"source": None}, "max_steps": 1}
        run_rl(rl_config(Path(folder) / name, **(defaults | changes)))


@pytest.fixture(scope="module")
def metrics(tmp_path_factory):
    folder = tmp_path_factory.mktemp("options")
    run_ranks(2, run_variants, str(folder), timeout_s=200)
    lines = {}
    for name in VARIANTS:
        (line,) = (folder / name / "metrics.jsonl").read_text().splitlines()
        lines[name] = json.loads(line)
    return lines


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_trains(metrics, name):
    line = metrics[name]
    assert math.isfinite(line["loss/mean"])
    assert line["optim/skipped_steps"] == 0
    assert line["progress/trained_tokens"] > 0 or name == "all truncated and masked"


def test_an_environment_that_differs_by_rank_ends_all_ranks(tmp_path):
    first, second = run_ranks(2, run_differing, str(tmp_path), timeout_s=200)
    assert first == second
    other_rows, made_on_the_fly, more_rows, failing = first
    assert "the ranks hold different data" in other_rows
    assert "the ranks hold different prompts" in made_on_the_fly
    assert "the ranks hold different data" in more_rows
    assert "rank 1: reward 'failing_on_rank_1' failed on" in failing


def test_variants_show_in_the_metrics(metrics):
    assert metrics["importance masked"]["ratio/masked"] == 1.0
    assert metrics["importance truncated"]["ratio/masked"] == 0.0
    truncated = metrics["all truncated and masked"]
    assert truncated["rollout/truncated"] == 1.0
    assert truncated["progress/trained_tokens"] == 0
    assert truncated["loss/mean"] == 0.0
    assert {truncated[f"ratio/{name}"] for name in ("mean", "min", "max", "sampler_mean")} == {1.0}
    assert metrics["resampled"]["rollout/resampled_groups"] == 8
    assert metrics["entropy bonus"]["loss/mean"] != metrics["adamw"]["loss/mean"]
