"""Invariant 7: a run cut in three equals the uninterrupted one, also at another world size."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.launch import launch_ranks
from tests.support.tiny import write_tiny_run
from trainer.checkpoint.manifest import read_manifest
from trainer.checkpoint.safe_load import read_index, read_tensor

pytestmark = pytest.mark.distributed

NUM_STEPS = 7
CUTS = (3, 4)
"""Two resumes in a row; sixteen rows make about two steps, so epochs end in each part."""

MAIN = "import sys; from trainer.__main__ import main; sys.exit(main())"


def run(folder: Path, name: str, world_size: int, *flags: str) -> Path:
    words = ["sft", "@", str(folder / "config.toml"), "--output-dir", str(folder / name)]
    ends = launch_ranks(world_size, MAIN, *words, "--data.batch-size", "4", *flags)
    assert [end.status for end in ends] == [0] * world_size, ends[0].err
    return folder / name


def run_in_parts(folder: Path, name: str, world_size: int, *flags: str) -> Path:
    run(folder, name, world_size, "--max-steps", str(CUTS[0]), *flags)
    for step in (*CUTS[1:], NUM_STEPS):
        resume = ("--ckpt.resume", "latest", "--max-steps", str(step))
        run(folder, name, world_size, *resume, *flags)
    return folder / name


def metrics(folder: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    return [line[name] for line in lines]


def state(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = folder / "checkpoints" / f"step_{NUM_STEPS}"
    index = read_index(checkpoint)
    return {name: read_tensor(checkpoint, index, name) for name in index.state_dict_metadata}


def data_position(folder: Path) -> dict:
    return read_manifest(folder / "checkpoints" / f"step_{NUM_STEPS}").progress["data"]


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [(1, ()), (4, ("--parallel.ep", "2"))],
    ids=["one rank", "four ranks, ep 2"],
)
def test_two_resumes_change_no_bit(tmp_path, world_size, flags):
    write_tiny_run(tmp_path)
    whole = run(tmp_path, "whole", world_size, "--max-steps", str(NUM_STEPS), *flags)
    parts = run_in_parts(tmp_path, "parts", world_size, *flags)
    for name in ("loss/mean", "optim/grad_norm", "progress/trained_tokens"):
        assert metrics(parts, name) == metrics(whole, name)
    expected, found = state(whole), state(parts)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert data_position(parts) == data_position(whole)
    assert sorted(path.name for path in parts.glob("config*.toml")) == [
        "config.resume-1.toml",
        "config.resume-2.toml",
        "config.toml",
    ]


def test_another_world_size_goes_on_with_the_same_numbers_and_data(tmp_path):
    write_tiny_run(tmp_path)
    whole = run(tmp_path, "whole", 1, "--max-steps", str(NUM_STEPS))
    run(tmp_path, "moved", 2, "--max-steps", str(CUTS[0]), "--parallel.ep", "2")
    resume = ("--ckpt.resume", "latest", "--max-steps", str(NUM_STEPS), "--parallel.ep", "1")
    moved = run(tmp_path, "moved", 1, *resume, "--optim.impl", "per_matrix")
    # Sums over ranks associate otherwise: 1e-5 is the design's bound.
    losses = metrics(moved, "loss/mean"), metrics(whole, "loss/mean")
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert data_position(moved) == data_position(whole)
