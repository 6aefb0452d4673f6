"""A run that is killed at random moments, again and again, ends as one that never was.

`pytest -m slow -s -k 50 tests/integration/test_runs_survive_kills.py` is the long loop.
"""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from trainer.checkpoint.folder import list_leftovers, list_steps
from trainer.checkpoint.safe_load import read_index, read_tensor

pytestmark = pytest.mark.distributed

INTERVAL = 3
STEPS_A_KILL = 24
START_LIMIT_S = 120.0
CONFIG = """
max_steps = {max_steps}
output_dir = "{folder}"

[model]
weights = "random"
compute_dtype = "float32"

[model.architecture]
type = "qwen3_moe"
vocab_size = 320
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 8
num_experts = 4
num_experts_per_tok = 2
moe_intermediate_size = 16

[optim]
type = "muon"
ns_dtype = "float32"

[data]
seq_len = 96
batch_size = 2
micro_batch_size = 2

[data.source]
type = "reasoning_gym"
task = "simple_equations"
size = 40

[ckpt]
interval = {interval}
weights_interval = 7
keep_last = 2
weights_dtype = "float32"

[wandb]
enabled = false
"""


def start(config: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trainer", "sft", "@", str(config), *flags]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-3000:]
    return output


def logged_steps(folder: Path) -> list[int]:
    """Return the steps in `metrics.jsonl`; a line cut by a kill counts for nothing."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]


def kill_at_random(
    process: subprocess.Popen[str], folder: Path, moments: random.Random
) -> int | None:
    """Kill the run a random while after its first step; return the last step it had logged."""
    before, deadline = max(logged_steps(folder), default=0), time.monotonic() + START_LIMIT_S
    while max(logged_steps(folder), default=0) <= before and process.poll() is None:
        assert time.monotonic() < deadline, "the run does not get to its first step"
        time.sleep(0.02)
    time.sleep(moments.uniform(0, 1))
    if process.poll() is not None:
        finish(process)
        return None
    process.kill()
    process.communicate()
    return max(logged_steps(folder), default=0)


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return all tensors, the random generators included."""
    index = read_index(checkpoint)
    return {name: read_tensor(checkpoint, index, name) for name in index.state_dict_metadata}


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(record["step"], record["loss/mean"]) for record in map(json.loads, lines)]


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("num_kills", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_run_ends_as_the_uninterrupted_one(tmp_path: Path, num_kills: int):
    max_steps = STEPS_A_KILL * num_kills
    folders = {name: tmp_path / name for name in ("whole", "killed")}
    for name, folder in folders.items():
        text = CONFIG.format(max_steps=max_steps, folder=folder, interval=INTERVAL)
        (tmp_path / f"{name}.toml").write_text(text)
    finish(start(tmp_path / "whole.toml"))

    killed, moments = folders["killed"], random.Random(0)
    for kill in range(num_kills):
        process = start(tmp_path / "killed.toml", "--ckpt.resume", "latest")
        reached = kill_at_random(process, killed, moments)
        if reached is None:
            break
        steps = list_steps(killed / "checkpoints")
        leftovers = [path.name for path in list_leftovers(killed / "checkpoints")]
        print(f"kill {kill + 1}: at step {reached}, checkpoints {steps}, leftovers {leftovers}")
        assert max(steps, default=0) > reached - INTERVAL - 1, "more than one interval is lost"
    assert kill + 1 >= min(num_kills, 3), "the run ended before it could be killed"
    finish(start(tmp_path / "killed.toml", "--ckpt.resume", "latest"))

    assert losses(killed) == losses(folders["whole"])
    assert [step for step, _ in losses(killed)] == list(range(1, max_steps + 1))
    name = f"step_{max_steps}"
    whole, resumed = (tensors_of(f / "checkpoints" / name) for f in folders.values())
    assert whole.keys() == resumed.keys()
    assert [key for key in whole if not torch.equal(whole[key], resumed[key])] == []
    weights = [f / "weights" / name / "model.safetensors" for f in folders.values()]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert list_leftovers(killed / "checkpoints") == []
