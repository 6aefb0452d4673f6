"""Ranks that hold different experts and answer different prompts generate what one process does."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.support.meshes import one_rank_mesh
from tests.support.networks import moe_architecture, random_model
from tests.support.spawn import run_ranks
from trainer.config.parallel import ParallelConfig
from trainer.model import setup_model
from trainer.model.generate import generate_greedily
from trainer.parallel.mesh import build_mesh

pytestmark = pytest.mark.distributed

PROMPTS = [[[1, 2, 3], [4]], [[5, 6], [7, 8, 9, 10]]]
MODEL = random_model(moe_architecture())


def generate(model, prompts: list[list[int]]) -> list[list[int]]:
    return generate_greedily(
        model, prompts, max_new_tokens=8, eos_id=11, pad_id=0, device=torch.device("cpu")
    )


def generate_on_both_splits() -> list[list[list[int]]]:
    answers = []
    for ep in (1, 2):
        model = setup_model(MODEL, build_mesh(ParallelConfig(ep=ep), "cpu"))
        answers.append(generate(model, PROMPTS[dist.get_rank()]))
        assert all(isinstance(p, DTensor) for p in model.parameters())
    return answers


def test_every_rank_generates_what_one_process_does() -> None:
    by_rank = run_ranks(2, generate_on_both_splits)
    with one_rank_mesh() as mesh:
        model = setup_model(MODEL, mesh)
        for prompts, answers in zip(PROMPTS, by_rank, strict=True):
            expected = generate(model, prompts)
            assert answers == [expected, expected]
