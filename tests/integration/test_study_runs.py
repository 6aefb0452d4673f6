"""The short form of the optimizer study runs from nothing to figures, table and JSON."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.study.optimizers import WIDE
from scripts.study.two_rates import split_rest
from trainer.config.optim import AdamWConfig
from trainer.optim import setup_optimizer
from trainer.optim.coefficients import resolve_coefficients
from trainer.optim.kernels.gram import gram_segments, single_segments
from trainer.optim.torch_optimizers import AdamW

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[2]
MODULE = "scripts.study.optimizers"
QUERY_SIZE = 4 * 32
"""Heads of configs/pretrain/demo.toml by their size."""


def test_short_study_reports_and_does_not_repeat_finished_runs(tmp_path):
    short = ["--out", str(tmp_path), "--short", "--steps", "2", "--overlay-steps", "2"]
    command = [sys.executable, "-m", MODULE, *short]
    first = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert first.returncode == 0, first.stderr[-3000:]
    record = json.loads((tmp_path / "optimizers.json").read_text())
    assert record["best_lr"] == {"adamw": [0.002, 0.002], "muon": [0.002, 0.002]}
    (overlaid,) = record["overlaid"].values()
    assert overlaid["per_matrix"] == pytest.approx(overlaid["stacked, 1 rank"], abs=1e-4)
    assert {"optimizers.png", "overlay.png", "table.md"} <= {p.name for p in tmp_path.iterdir()}
    log = (tmp_path / "optimizers.log").read_text()
    assert len(log.splitlines()) == 4, "one run an optimizer, one an overlaid setting"
    again = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert again.returncode == 0, again.stderr[-3000:]
    assert (tmp_path / "optimizers.log").read_text() == log
    assert json.loads(again.stdout.splitlines()[-1])["steps"] == 2


def test_the_shapes_of_the_kernels_overlay_are_such_that_gram_fuses_in_bfloat16():
    sizes = dict(itertools.pairwise(WIDE))
    hidden = int(sizes["--model.architecture.hidden-size"])
    expert = int(sizes["--model.architecture.moe-intermediate-size"])
    rows = resolve_coefficients("quintic", 5)
    for other in (expert, QUERY_SIZE):
        assert gram_segments(rows, torch.bfloat16, other, hidden) == (2, 1, 1, 1)
        assert gram_segments(rows, torch.float32, other, hidden) == single_segments(5)


def test_adamw_with_two_rates_moves_each_weight_by_its_own():
    shapes = {"model.embed_tokens.weight": (6, 4), "q_proj.weight": (4, 4), "norm.weight": (4,)}
    named = [(name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]
    optimizer = setup_optimizer(AdamWConfig(lr=0.5, weight_decay=0.0), named)
    assert isinstance(optimizer, AdamW)
    optimizer = split_rest(optimizer, named, 2.0)
    for _, parameter in named:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    # The first step of Adam is the rate, whatever the gradient.
    for (name, parameter), moved in zip(named, (2.0, 0.5, 2.0), strict=True):
        assert parameter.detach().allclose(torch.tensor(-moved)), name


def test_short_rates_of_data_are_measured_and_kept(tmp_path):
    module = ("-m", "scripts.study.data_rates", "--out", str(tmp_path), "--mib", "1")
    done = subprocess.run(
        [sys.executable, *module], capture_output=True, text=True, timeout=280, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads((tmp_path / "data_rates.json").read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == record
    assert (
        record["stream from tokens, million tokens/s"]
        > record["stream from plain, million tokens/s"]
    )
    assert record["opening 1 TiB of JSONL, s"] < 5
    assert record["position in gzip, bytes"] < 4096
