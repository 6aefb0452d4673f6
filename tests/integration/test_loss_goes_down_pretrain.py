"""A small mixture of experts learns the standard library's sources, and shows what it writes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[2]
SMALLER = [
    *("--max-steps", "30", "--val.interval", "10", "--val.max-packs", "4"),
    *("--val.max-new-tokens", "30", "--data.seq-len", "128", "--wandb.enabled", "false"),
    *("--model.architecture.hidden-size", "64", "--model.architecture.num-hidden-layers", "1"),
]


def test_the_demo_learns_and_prints_samples(tmp_path):
    command = [sys.executable, "-m", "trainer", "pretrain", "@", "configs/pretrain/demo.toml"]
    ended = subprocess.run(
        [*command, *SMALLER, "--output-dir", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=ROOT,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [line["val/loss"] for line in map(json.loads, lines) if "val/loss" in line]
    # Not at every evaluation: what is read is the standard library of this very Python.
    assert losses[-1] < losses[0]
    # Letters' frequencies alone give about 3.2; a uniform guess 5.6.
    assert losses[-1] < 3.4
    assert ended.stdout.count("samples before training") == 1
    assert ended.stdout.count("--- 'def ' goes on:\ndef ") == 2
    assert (tmp_path / "run" / "weights" / "step_30" / "model.safetensors").exists()
