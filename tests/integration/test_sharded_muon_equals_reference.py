"""Muon over 1, 2 and 4 ranks equals a float64 reference on full tensors, in every layout."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from tests.support.muon_reference import Rule, reference_step
from tests.support.sharding import distribute, shard_of
from tests.support.spawn import run_ranks
from trainer.optim.muon import Muon
from trainer.optim.options import MuonOptions

pytestmark = pytest.mark.distributed

# float32 Newton-Schulz against float64 over three steps of lr 0.02: 1e-5 of the weight's norm.
FP32_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """Parameters of one placement on one mesh, and how they are updated."""

    name: str
    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]
    shapes: tuple[tuple[int, ...], ...]
    rule: Rule = field(default_factory=Rule)
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    tolerance: float = FP32_TOLERANCE
    gradient_scale: float = 1.0
    is_missing: Callable[[int, int], bool] = lambda index, rank: False
    parameter_name: str = "layer.weight"


def _lacks_on_odd_ranks(index: int, rank: int) -> bool:
    return index == 0 and rank % 2 == 1


def _lacks_everywhere(index: int, rank: int) -> bool:
    return index == 0


DENSE = ((16, 8), (16, 8), (16, 8), (8, 16), (10, 6), (3, 5), (1, 7), (7, 1))
GATE_UP = "mlp.experts.gate_up_proj"
SMALL_CHUNKS = {"max_stack_gib": 16 * 8 * 4 / 2**30}


def cases(n: int) -> list[Case]:
    """Return the cases of a world of n ranks."""
    s0, s1, s2, r = Shard(0), Shard(1), Shard(2), Replicate()
    found = [
        Case("rows over dp_shard", (n,), (s0,), DENSE),
        Case("rows over dp_shard, many chunks", (n,), (s0,), DENSE, options=SMALL_CHUNKS),
        Case("columns over dp_shard", (n,), (s1,), DENSE),
        Case("whole on every rank", (n,), (r,), DENSE),
        Case("whole, repeated", (n,), (r,), DENSE, options={"replicate": "repeat"}),
        Case("experts over ep", (1, 1, n), (r, _StridedShard(0, split_factor=n), s0), ((4, 6, 4),)),
        Case(
            "fewer experts than ranks",
            (n, 1),
            (s0, r),
            ((3, 6, 4), (2, 6, 4), (1, 6, 4), (5, 6, 4)),
        ),
        Case(
            "rows of experts",
            (n,),
            (s1,),
            ((3, 8, 4), (2, 8, 4), (3, 5, 4)),
            parameter_name=GATE_UP,
        ),
        Case("columns of experts", (n,), (s2,), ((3, 8, 4), (2, 8, 5))),
        Case(
            "gate and up apart, rows",
            (n,),
            (s1,),
            ((3, 8, 4), (1, 6, 4)),
            Rule(num_row_blocks=2),
            {"split_gate_up": True},
            parameter_name=GATE_UP,
        ),
        Case(
            "gate and up apart, columns",
            (n,),
            (s2,),
            ((3, 8, 4),),
            Rule(num_row_blocks=2),
            {"split_gate_up": True},
            parameter_name=GATE_UP,
        ),
        Case(
            "gate and up apart, stack",
            (n,),
            (s0,),
            ((5, 8, 4),),
            Rule(num_row_blocks=2),
            {"split_gate_up": True},
            parameter_name=GATE_UP,
        ),
        Case("convolutions flattened", (n,), (s0,), ((6, 3, 2, 2),), Rule(flatten=True)),
        Case("convolutions flattened, dim 1", (n,), (s1,), ((6, 3, 2, 2),), Rule(flatten=True)),
        Case("convolutions as stacks", (n,), (s0,), ((6, 3, 2, 2),)),
        Case("nesterov", (n,), (s0,), DENSE, Rule(nesterov=True)),
        Case(
            "cautious, spectral", (n,), (s0,), DENSE, Rule(cautious=True, adjust_lr="spectral_norm")
        ),
        Case("no scale", (n,), (s1,), DENSE, Rule(adjust_lr=None)),
        Case("tiny gradients", (n,), (s0,), DENSE, Rule(mu=0.0), gradient_scale=1e-37),
        Case("huge gradients", (n,), (s0,), DENSE, Rule(mu=0.0), gradient_scale=1e37),
        Case("missing on odd ranks", (n,), (s0,), DENSE, is_missing=_lacks_on_odd_ranks),
        Case("missing everywhere", (n,), (s0,), DENSE, is_missing=_lacks_everywhere),
        Case(
            "experts missing on odd ranks",
            (n,),
            (s0,),
            ((5, 6, 4), (4, 6, 4)),
            is_missing=_lacks_on_odd_ranks,
        ),
        # bfloat16 iterates are exact to 2^-8; the step of three updates is a tenth of the weight.
        Case(
            "bfloat16 on the wire",
            (n,),
            (s0,),
            DENSE,
            options={"ns_dtype": "bfloat16"},
            tolerance=1.2e-2,
        ),
        Case(
            "float16 on the wire",
            (n,),
            (s0,),
            DENSE,
            options={"ns_dtype": "float16"},
            tolerance=2e-3,
        ),
        Case(
            "float16 on the wire, tiny gradients",
            (n,),
            (s0,),
            DENSE,
            Rule(mu=0.0),
            {"ns_dtype": "float16"},
            tolerance=2e-3,
            gradient_scale=1e-30,
        ),
        # Weights in bfloat16 are rounded to 2^-9 each step.
        Case("bfloat16 weights", (n,), (s0,), DENSE, dtype=torch.bfloat16, tolerance=1.2e-2),
        Case("per matrix", (n,), (s0,), (*DENSE, (3, 8, 4)), options={"impl": "per_matrix"}),
    ]
    if n == 4:
        found += _two_dimensional_cases()
    return found


def _two_dimensional_cases() -> list[Case]:
    s0, s1, r = Shard(0), Shard(1), Replicate()
    strided = _StridedShard(0, split_factor=2)
    stacks = ((8, 6, 4), (6, 6, 4), (2, 6, 4), (8, 4, 6))
    return [
        Case("HSDP", (2, 2), (r, s0), DENSE),
        Case("HSDP, many chunks", (2, 2), (r, s0), DENSE, options=SMALL_CHUNKS),
        Case("HSDP, repeated", (2, 2), (r, s0), DENSE, options={"replicate": "repeat"}),
        Case("HSDP on columns", (2, 2), (r, s1), DENSE),
        Case("HSDP missing on odd ranks", (2, 2), (r, s0), DENSE, is_missing=_lacks_on_odd_ranks),
        Case("experts over dp_shard_mod_ep x ep", (1, 2, 2), (r, strided, s0), stacks),
        Case(
            "experts per matrix",
            (1, 2, 2),
            (r, strided, s0),
            stacks,
            options={"impl": "per_matrix"},
        ),
        Case("experts over ep, rows over dp_shard_mod_ep", (1, 2, 2), (r, s1, s0), stacks),
        Case("experts, HSDP and ep", (2, 1, 2), (r, _StridedShard(0, split_factor=2), s0), stacks),
        Case(
            "experts, HSDP and ep, many chunks",
            (2, 1, 2),
            (r, s1, s0),
            stacks,
            options=SMALL_CHUNKS,
        ),
        Case(
            "experts, HSDP and fsdp", (2, 2, 1), (r, _StridedShard(0, split_factor=1), s0), stacks
        ),
        Case("experts, HSDP and rows", (2, 2, 1), (r, s1, s0), stacks),
        Case("whole on a two-axis mesh", (2, 2), (r, r), DENSE),
    ]


def _axis_names(num_axes: int) -> tuple[str, ...]:
    return {
        1: ("dp_shard",),
        2: ("dp_replicate", "dp_shard"),
        3: ("dp_replicate", "dp_shard_mod_ep", "ep"),
    }[num_axes]


def _run_cases(world_size: int) -> list[str]:
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    failures = []
    for case in cases(world_size):
        if case.mesh not in meshes:
            meshes[case.mesh] = init_device_mesh(
                "cpu", case.mesh, mesh_dim_names=_axis_names(len(case.mesh))
            )
        failures += _run_case(case, meshes[case.mesh])
    return failures


def _run_case(case: Case, mesh: DeviceMesh) -> list[str]:
    generator = torch.Generator().manual_seed(5)
    full = [torch.randn(shape, generator=generator).to(case.dtype) for shape in case.shapes]
    expected = [(w.double(), torch.zeros_like(w).double()) for w in full]
    parameters = [torch.nn.Parameter(distribute(w, mesh, case.placements)) for w in full]
    optimizer = _build(case, parameters)
    flag = torch.tensor(True)
    for _ in range(3):
        gradients = [torch.randn(shape, generator=generator) for shape in case.shapes]
        gradients = [(g * case.gradient_scale).to(case.dtype) for g in gradients]
        for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            parameter.grad = None
            if not case.is_missing(index, mesh.get_rank()):
                parameter.grad = distribute(gradient, mesh, case.placements)
            if all(case.is_missing(index, rank) for rank in range(mesh.size())):
                continue
            seen = _seen_gradient(case, index, gradient, mesh)
            expected[index] = reference_step(*expected[index], seen, case.rule)
        with CommDebugMode() as counter:
            optimizer.step(finite=flag)
        if case.options.get("impl") != "per_matrix":
            assert counter.get_total_counts() == optimizer.plan.num_collectives(), case.name
    return _compare(case, parameters, expected, mesh)


def _build(case: Case, parameters: list[torch.nn.Parameter]) -> Muon:
    rule = case.rule
    return Muon(
        [(f"layers.{i}.{case.parameter_name}", p) for i, p in enumerate(parameters)],
        lr=rule.lr,
        mu=rule.mu,
        weight_decay=rule.weight_decay,
        nesterov=rule.nesterov,
        cautious_wd=rule.cautious,
        adjust_lr=rule.adjust_lr,  # pyright: ignore[reportArgumentType]
        flatten=rule.flatten,
        options=MuonOptions(**{"ns_dtype": "float32", **case.options}),
    )


def _seen_gradient(case: Case, index: int, gradient: Tensor, mesh: DeviceMesh) -> Tensor:
    """Zero the parts whose ranks lack the gradient: what one process would have got."""
    here = torch.full_like(gradient, float(not case.is_missing(index, mesh.get_rank())))
    shard = shard_of(here, mesh, case.placements)
    mask = distribute(torch.zeros_like(gradient), mesh, case.placements)
    mask.to_local().copy_(shard)
    return gradient * _assemble(mask, mesh, case.placements)


def _assemble(tensor: Any, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Tensor:
    """Rebuild a full tensor, each rank's shard found by sharding the numbers of its elements."""
    numbers = torch.arange(tensor.numel()).view(tensor.shape)
    full = torch.zeros(tensor.numel(), dtype=torch.float64)
    local = tensor.to_local()
    full[shard_of(numbers, mesh, placements).flatten()] = local.double().flatten()
    count = torch.zeros_like(full)
    count[shard_of(numbers, mesh, placements).flatten()] = 1
    torch.distributed.all_reduce(full)
    torch.distributed.all_reduce(count)
    return (full / count).view(tensor.shape)


def _compare(
    case: Case,
    parameters: list[torch.nn.Parameter],
    expected: list[tuple[Tensor, Tensor]],
    mesh: DeviceMesh,
) -> list[str]:
    failures = []
    for shape, parameter, (weight, _) in zip(case.shapes, parameters, expected, strict=True):
        found = _assemble(parameter.data, mesh, case.placements)
        error = float((found - weight).norm() / weight.norm())
        if not error <= case.tolerance:
            failures.append(f"{case.name} {shape}: relative error {error:.2g}")
        replicas = shard_of(found, mesh, case.placements)
        if not torch.allclose(
            parameter.data.to_local().double(),
            replicas,
            rtol=1e-6,
            atol=1e-7,  # pyright: ignore
        ):
            failures.append(f"{case.name} {shape}: replicas differ")
    return failures


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_layout_equals_the_reference(world_size: int) -> None:
    for failures in run_ranks(world_size, _run_cases, world_size, timeout_s=200):
        assert failures == []
