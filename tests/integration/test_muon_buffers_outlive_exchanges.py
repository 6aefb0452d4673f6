"""Ranks that lag behind one another, with freed memory written over, step as ranks in step do."""

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from tests.support.sharding import distribute
from tests.support.spawn import run_ranks
from trainer.optim import Muon, MuonOptions
from trainer.optim.exchange import Exchange, Transfer
from trainer.optim.state import local

pytestmark = pytest.mark.distributed

NUM_STEPS, MAX_DELAY_S = 6, 0.004
# Two matrices of 24x16 a chunk: many exchanges under way, one after the other.
OPTIONS = {"ns_dtype": "float32", "max_stack_gib": 2 * 6 * 24 * 24 * 4 / 2**30}


class Poisoned:
    """Delays a rank around its exchanges and fills with NaN what memory it could get back."""

    def __init__(self, exchange: Exchange, seed: int) -> None:
        self._random = random.Random(seed)
        self._launch, self._wait = exchange._launch, exchange.wait
        exchange._launch, exchange.wait = self.launch, self.wait  # pyright: ignore

    def launch(self, collective: Callable[..., Any], output: Tensor, *rest: Any) -> Transfer:
        self._delay()
        output.fill_(torch.nan)  # what has not arrived is not what was there by chance
        transfer = self._launch(collective, output, *rest)
        self._poison(transfer)
        return transfer

    def wait(self, transfer: Transfer) -> Tensor:
        self._delay()
        self._poison(transfer)
        return self._wait(transfer)

    def _delay(self) -> None:
        time.sleep(self._random.random() * MAX_DELAY_S)

    def _poison(self, transfer: Transfer) -> None:
        """Take blocks of the sizes of the exchange's buffers, if they were freed, and ruin them."""
        for buffer in (transfer.inputs, transfer.output):
            blocks = [torch.empty_like(buffer) for _ in range(8)]
            for block in blocks:
                block.fill_(torch.nan)


def _train(is_poisoned: bool) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    generator = torch.Generator().manual_seed(0)
    placements = (Replicate(), Shard(0))
    parameters = [
        nn.Parameter(distribute(torch.randn(24, 16, generator=generator), mesh, placements))
        for _ in range(12)
    ]
    optimizer = Muon(parameters, options=MuonOptions(**OPTIONS))  # pyright: ignore
    assert optimizer.plan.num_exchanges() >= 6
    if is_poisoned:
        Poisoned(optimizer._exchange, seed=dist.get_rank())
    for _ in range(NUM_STEPS):
        for parameter in parameters:
            gradient = torch.randn(24, 16, generator=generator)
            parameter.grad = distribute(gradient, mesh, placements)
        optimizer.step(finite=torch.tensor(True))
    return [local(parameter.data) for parameter in parameters]


def _compare() -> int:
    assert all(map(torch.equal, _train(is_poisoned=False), _train(is_poisoned=True)))
    return NUM_STEPS


def test_delayed_ranks_and_poisoned_memory_change_no_bit() -> None:
    assert run_ranks(4, _compare) == [NUM_STEPS] * 4
