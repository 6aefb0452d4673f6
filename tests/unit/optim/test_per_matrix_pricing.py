from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils.flop_counter import FlopCounterMode

from tests.support.sharding import distribute
from tests.support.threads import run_threads
from trainer.optim import Muon, MuonOptions

PLACED = {
    "w": ((6, 4), (Shard(0), Shard(1))),
    "whole": ((4, 8), (Replicate(), Replicate())),
    "mlp.experts.gate_up_proj": ((3, 8, 4), (Replicate(), Shard(0))),
    "none": ((0, 4), (Replicate(), Shard(1))),
}


def step_and_price(counts: Counter[int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return what a step did, and what it was said to cost: (collectives, FLOPs)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    named = []
    for name, (shape, placements) in PLACED.items():
        parameter = nn.Parameter(distribute(torch.ones(shape), mesh, placements))
        parameter.grad = distribute(torch.ones(shape), mesh, placements)
        named.append((name, parameter))
    optimizer = Muon(
        [{"params": named[1:]}, {"params": named[:1], "algorithm": "adamw"}],
        options=MuonOptions(impl="per_matrix", split_gate_up=True),
    )
    before = counts[dist.get_rank()]
    with FlopCounterMode(display=False) as flops:
        optimizer.step()
    price = optimizer.price()
    done = counts[dist.get_rank()] - before, flops.get_total_flops()
    assert optimizer.plan.num_collectives() == price.num_collectives
    return done, (price.num_collectives, price.flops)


def test_the_price_of_the_reference_is_what_it_does(monkeypatch) -> None:
    counts: Counter[int] = Counter()
    all_reduce = dist.all_reduce

    def count(*args: Any, **kwargs: Any) -> Any:
        counts[dist.get_rank()] += 1
        return all_reduce(*args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", count)
    for done, price in run_threads(4, step_and_price, counts):
        assert done == price
        assert min(done) > 0
