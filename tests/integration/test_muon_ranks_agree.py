"""What ranks must agree on: skipped steps, missing gradients, saved state, shared work."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.flop_counter import FlopCounterMode

from tests.support.sharding import distribute
from tests.support.spawn import run_ranks
from trainer.config.optim import AdamWConfig, MuonConfig, SGDConfig
from trainer.errors import UserError
from trainer.optim import Muon, MuonOptions, setup_optimizer

pytestmark = pytest.mark.distributed

SHAPES = {
    "embed_tokens.weight": (9, 4),
    "q_proj.weight": (8, 4),
    "mlp.gate.weight": (3, 4),
    "mlp.experts.gate_up_proj": (3, 8, 4),
    "norm.weight": (5,),
}


class Model(nn.Module):
    """The parameters above under their names, sharded on dim 0."""

    def __init__(self, mesh: Any, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            *path, leaf = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            full = torch.randn(shape, generator=generator)
            placements = (Replicate(), Shard(0))
            module.register_parameter(leaf, nn.Parameter(distribute(full, mesh, placements)))

    def fill_gradients(self, seed: int, lacking: tuple[str, ...] = ()) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            full = torch.randn(SHAPES[name], generator=generator)
            parameter.grad = None
            if name not in lacking:
                assert isinstance(parameter.data, DTensor)
                parameter.grad = distribute(
                    full, parameter.data.device_mesh, (Replicate(), Shard(0))
                )


def _local_state(model: Model, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = []
    for parameter in model.parameters():
        for value in (parameter.data, *optimizer.state[parameter].values()):
            value = value.to_local() if isinstance(value, DTensor) else value
            found.append(value.detach().clone())
    return found


def _mesh() -> Any:
    return init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "dp_shard"))


CONFIGS = [
    MuonConfig(ns_dtype="float32"),
    MuonConfig(ns_dtype="bfloat16", cautious_wd=True),
    MuonConfig(ns_dtype="float32", impl="per_matrix"),
    AdamWConfig(),
    SGDConfig(momentum=0.9),
]


def _skip_everywhere() -> None:
    mesh = _mesh()
    for config in CONFIGS:
        model = Model(mesh)
        optimizer = setup_optimizer(config, model.named_parameters(), mesh)
        model.fill_gradients(1)
        optimizer.step(finite=torch.tensor(True))
        assert optimizer.settle()
        before = _local_state(model, optimizer)
        model.fill_gradients(2)
        if dist.get_rank() == 1:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.to_local().fill_(float("nan"))
        optimizer.step(finite=torch.tensor(False))
        assert not optimizer.settle()
        for old, new in zip(before, _local_state(model, optimizer), strict=True):
            assert torch.equal(old, new)
        assert all(group.get("step", 1) == 1 for group in optimizer.param_groups)


def _save_and_load_by_name() -> None:
    mesh = _mesh()
    config = MuonConfig(ns_dtype="float32")
    model, resumed = Model(mesh), Model(mesh, seed=9)
    optimizer = setup_optimizer(config, model.named_parameters(), mesh)
    other = setup_optimizer(config, resumed.named_parameters(), mesh)
    model.fill_gradients(1)
    optimizer.step(finite=torch.tensor(True))
    # A copy: like torch's, a load does not copy tensors of the right device and dtype.
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    assert "mlp.experts.gate_up_proj" in state["state"]
    set_optimizer_state_dict(resumed, other, state)
    resumed.load_state_dict(model.state_dict())
    for one, its in ((model, optimizer), (resumed, other)):
        one.fill_gradients(2)
        its.step(finite=torch.tensor(True))
    for a, b in zip(_local_state(model, optimizer), _local_state(resumed, other), strict=True):
        assert torch.equal(a, b)


def _missing_adamw_gradients() -> None:
    mesh = _mesh()
    names = ("embed_tokens.weight", "norm.weight", "q_proj.weight")
    for where in ("one rank", "both ranks"):
        model, full = Model(mesh), Model(mesh)
        lacks = where == "both ranks" or dist.get_rank() == 1
        outcomes = []
        for one in (model, full):
            optimizer = setup_optimizer(
                MuonConfig(ns_dtype="float32"), one.named_parameters(), mesh
            )
            one.fill_gradients(1, names if lacks and one is model else ())
            if one is full and lacks:
                for name, parameter in one.named_parameters():
                    if name in names:
                        assert parameter.grad is not None
                        parameter.grad.to_local().zero_()
            before = _local_state(one, optimizer)
            optimizer.step(finite=torch.tensor(True))
            outcomes.append((before, _local_state(one, optimizer)))
        (start, found), (_, with_zeros) = outcomes
        if where == "one rank":
            for a, b in zip(found, with_zeros, strict=True):
                assert torch.equal(a, b)
        else:
            kept = [torch.equal(a, b) for a, b in zip(start, found, strict=True)]
            # embed: weight, momentum, variance, step; q_proj: weight, momentum; norm: as embed.
            assert kept[:6] == [True] * 6
            assert kept[-4:] == [True] * 4


def _all_on_two_ranks() -> None:
    _skip_everywhere()
    _save_and_load_by_name()
    _missing_adamw_gradients()


def test_two_ranks_skip_save_and_miss_gradients_alike() -> None:
    run_ranks(2, _all_on_two_ranks)


COPIES = {
    # Rank 3 holds the same as rank 1, along dp_replicate.
    "HSDP": ((8, 4), (Replicate(), Shard(0)), "muon"),
    "whole": ((8, 4), (Replicate(), Replicate()), "muon"),
    "copies along the inner axis": ((8, 4), (Shard(0), Replicate()), "muon"),
    "adamw": ((8, 4), (Replicate(), Shard(0)), "adamw"),
}


def _step_with_copies(
    shape: tuple[int, ...], placements: Any, algorithm: str, options: MuonOptions
) -> Muon:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    generator = torch.Generator().manual_seed(0)
    named = []
    for name in ("first", "other"):
        full = torch.randn(shape, generator=generator)
        parameter = nn.Parameter(distribute(full, mesh, placements))
        parameter.grad = distribute(full + 1, mesh, placements)
        named.append((name, parameter))
    groups = [{"params": named, "algorithm": algorithm}]
    return Muon(groups, lr=0.1, options=options)


def _state_of(optimizer: Muon) -> list[torch.Tensor]:
    parameters = optimizer.param_groups[0]["params"]
    values = [v for p in parameters for v in (p.data, *optimizer.state[p].values())]
    return [(v.to_local() if isinstance(v, DTensor) else v).clone() for v in values]


def _refuse_mixed_copies() -> None:
    finite = torch.tensor(True)
    for impl in ("stacked", "per_matrix"):
        options = MuonOptions(ns_dtype="float32", impl=impl)
        for label, case in COPIES.items():
            optimizer = _step_with_copies(*case, options)
            parameter = optimizer.param_groups[0]["params"][1]
            before, gradient = _state_of(optimizer), parameter.grad
            parameter.grad = None if dist.get_rank() == 3 else gradient
            optimizer.step(finite=finite if label == "HSDP" else None)
            with pytest.raises(UserError, match="parameter other had a gradient on some"):
                optimizer.state_dict()
            assert not optimizer.settle()
            assert optimizer.param_groups[0]["step"] == 0
            for old, new in zip(before, _state_of(optimizer), strict=True):
                assert torch.equal(old, new), label
            parameter.grad = gradient
            optimizer.step(finite=finite)
            assert optimizer.settle()
            assert not torch.equal(before[0], _state_of(optimizer)[0])


def _accept_what_no_copy_contradicts() -> None:
    options = MuonOptions(ns_dtype="float32")
    shards = (Replicate(), Shard(0))
    for shape, lacking in (((8, 4), (1, 3)), ((1, 4), (3,))):
        # Of (1, 4), ranks 1 and 3 hold nothing, so there is nothing to differ in.
        optimizer = _step_with_copies(shape, shards, "muon", options)
        before = _state_of(optimizer)
        if dist.get_rank() in lacking:
            optimizer.param_groups[0]["params"][0].grad = None
        optimizer.step()
        assert optimizer.settle()
        after = _state_of(optimizer)
        assert after[0].numel() == 0 or not torch.equal(before[0], after[0])


def _all_on_four_ranks() -> None:
    _refuse_mixed_copies()
    _accept_what_no_copy_contradicts()


def test_copies_that_differ_in_their_gradients_are_refused_on_all_ranks() -> None:
    run_ranks(4, _all_on_four_ranks)


def _count_flops() -> bool:
    """Return whether a rank does half of what it does alone, on two replicas of one shard."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    counts = {}
    for replicate in ("share", "repeat"):
        placements = (Replicate(), Shard(0))
        parameters = [
            (f"p{i}", nn.Parameter(distribute(torch.randn(16, 8), mesh, placements)))
            for i in range(4)
        ]
        for _, parameter in parameters:
            parameter.grad = distribute(torch.randn(16, 8), mesh, placements)
        optimizer = Muon(parameters, options=MuonOptions(replicate=replicate))
        with FlopCounterMode(display=False) as counter:
            optimizer.step()
        counts[replicate] = counter.get_total_flops()
    return 2 * counts["share"] == counts["repeat"] > 0


def test_flops_of_a_rank_halve_over_two_replicas() -> None:
    assert run_ranks(2, _count_flops) == [True, True]
