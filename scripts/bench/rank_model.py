"""One rank's share of a model: the real `setup_model`, with values drawn on the device.

Owns what the step benchmarks run on: a world that is real (torchrun) or imagined, the sharded
model in it, random weights and gradients. What is timed is the scripts' own.
"""

import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import trainer.model.setup
from trainer.config.model import ModelConfig
from trainer.config.parallel import ParallelConfig
from trainer.model.causal_lm import CausalLM
from trainer.parallel.mesh import build_mesh
from trainer.parallel.world import close_world, init_world

CONFIGS = Path(__file__).parents[2] / "configs" / "models"
TINY = {
    "type": "qwen3_moe",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


def is_launched() -> bool:
    """Tell whether torchrun started this process, so that the ranks are real."""
    return "WORLD_SIZE" in os.environ


@contextmanager
def open_ranks(device_type: str, num_ranks: int, rank: int) -> Iterator[int]:
    """Yield the number of ranks: torchrun's, or `num_ranks` imagined ones.

    Imagined ranks move nothing. What this rank would receive is filled from what it sends, so that
    buffers hold numbers of the right size instead of whatever was there (nan, often).
    """
    if is_launched():
        world = init_world(ParallelConfig(device="cuda" if device_type == "cuda" else "cpu"))
        yield world.size
        close_world()
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        with _echoed_exchanges():
            yield num_ranks
    finally:
        dist.destroy_process_group()


class _Done:
    """A transfer that ended before it was asked for."""

    def wait(self) -> None:
        """Return: there is nothing to wait for."""


@contextmanager
def _echoed_exchanges() -> Iterator[None]:
    """Fill the outputs of all-to-alls from their inputs: one copy on the device each."""

    def all_to_all_single(output: Tensor, input: Tensor, *_: Any, **__: Any) -> _Done:
        _echo(output, input)
        return _Done()

    def all_to_all(outputs: list[Tensor], inputs: list[Tensor], *_: Any, **__: Any) -> _Done:
        for output, sent in zip(outputs, inputs, strict=True):
            _echo(output, sent)
        return _Done()

    with (
        mock.patch.object(dist, "all_to_all_single", all_to_all_single),
        mock.patch.object(dist, "all_to_all", all_to_all),
    ):
        yield


def _echo(output: Tensor, sent: Tensor) -> None:
    output, sent = output.flatten(), sent.flatten()
    if not sent.numel():
        output.zero_()
        return
    for part in output.split(sent.numel()):
        part.copy_(sent[: part.numel()])


def read_model(name: str, num_layers: int | None, *, is_tiny: bool) -> ModelConfig:
    """Return the `model` section of configs/models/`name`.toml with random weights."""
    section: dict[str, Any] = {"architecture": dict(TINY)}
    if not is_tiny:
        section = tomllib.loads((CONFIGS / f"{name}.toml").read_text())["model"]
        section.pop("name")
    if num_layers is not None:
        section["architecture"]["num_hidden_layers"] = num_layers
    return ModelConfig.model_validate({**section, "weights": "random"})


def build_model(
    config: ModelConfig, ep: int, device_type: str, *, seed: int = 0
) -> tuple[CausalLM, DeviceMesh]:
    """Return the model as `setup_model` makes it and its mesh, weights drawn on the device.

    `setup_model` draws each matrix on the CPU, so that weights do not depend on the sharding; for
    the 30 billion of Qwen3-30B-A3B that takes a minute. Only this filling is replaced.

    Collective: all ranks.
    """
    mesh = build_mesh(ParallelConfig(ep=ep), device_type)
    with mock.patch.object(trainer.model.setup, "init_random_", fill_on_device_):
        model = trainer.model.setup.setup_model(config, mesh, seed=seed)
    return model, mesh


@torch.no_grad()
def fill_on_device_(model: nn.Module, *, seed: int, std: float) -> None:
    """Fill every local shard with normal numbers, norms' weights too."""
    rank = dist.get_rank()
    for index, parameter in enumerate(model.parameters()):
        shard = _local(parameter)
        generator = torch.Generator(shard.device).manual_seed(seed + 1000 * index + rank)
        shard.normal_(std=std, generator=generator)


@torch.no_grad()
def fill_gradients_(model: nn.Module, *, seed: int) -> None:
    """Give every parameter a Gaussian gradient, sharded as it is."""
    rank = dist.get_rank()
    for index, parameter in enumerate(model.parameters()):
        gradient = torch.empty_like(parameter)
        shard = _local(gradient)
        generator = torch.Generator(shard.device).manual_seed(seed + 1000 * index + rank)
        shard.normal_(std=1e-3, generator=generator)
        parameter.grad = gradient


def held_gib(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Return what this rank holds of weights, gradients and optimizer state."""
    state = [t for of in optimizer.state.values() for t in of.values() if isinstance(t, Tensor)]
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    return sum(_local(t).nbytes for t in (*parameters, *gradients, *state)) / 2**30


def largest_over_ranks(value: float, device: torch.device) -> float:
    """Return the largest value of any rank; where ranks are imagined, this one's.

    Collective: all-reduce over the world where ranks are real.
    """
    if not is_launched():
        return value
    result = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(result, dist.ReduceOp.MAX)
    return float(result)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
