from math import prod

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support.muon_reference import Rule, orthogonalize, reference_step
from tests.support.sharding import cut, distribute
from tests.support.threads import run_threads
from trainer.optim.flight import StepInputs
from trainer.optim.per_matrix import PerMatrixStep
from trainer.optim.spec import describe_parameters
from trainer.optim.state import local
from trainer.optim.timing import PhaseTimer

GATE_UP = "mlp.experts.gate_up_proj"
STRIDED = _StridedShard(0, split_factor=2)


def as_reference(matrices_BMN) -> torch.Tensor:
    return torch.stack([orthogonalize(matrix) for matrix in matrices_BMN])


def group_of(rule, parameters):
    return {
        "params": parameters,
        "algorithm": "muon",
        "lr": rule.lr,
        "mu": rule.mu,
        "weight_decay": rule.weight_decay,
        "nesterov": rule.nesterov,
        "cautious_wd": rule.cautious,
        "adjust_lr": rule.adjust_lr,
        "flatten": rule.flatten,
    }


def update(sizes, placements, shape, rule, name, gate) -> float:
    """Return the largest error of this rank's weights and momentum against one process."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b")[: len(sizes)])
    generator = torch.Generator().manual_seed(1)
    weight, momentum, gradient = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    parameter = nn.Parameter(distribute(weight, mesh, placements))
    parameter.grad = distribute(gradient, mesh, placements)
    m = distribute(momentum, mesh, placements)
    (spec,), meshes = describe_parameters([(name, parameter)])
    group = group_of(rule, [parameter])
    is_split = rule.num_row_blocks == 2
    timer = PhaseTimer(torch.device("cpu"))
    step = PerMatrixStep([spec], meshes, timer, as_reference, split_gate_up=is_split)
    with torch.no_grad():
        step.run(StepInputs([parameter], [m].__getitem__, [group], [gate], None))
    if gate is None or gate:
        weight, momentum = reference_step(weight, momentum, gradient, rule)
    errors = [
        (local(found) - cut(right, sizes, mesh.get_coordinate(), placements)).abs()
        for found, right in ((parameter.data, weight), (m, momentum))
    ]
    return max(float(e.max()) if e.numel() else 0.0 for e in errors)


CASES = {
    "two axes cut rows and columns": ((2, 2), (Shard(0), Shard(1)), (5, 6), Rule(), "w"),
    "one dim cut twice": ((2, 2), (STRIDED, Shard(0)), (7, 3), Rule(), "w"),
    "stack, HSDP": ((2, 2), (Replicate(), Shard(0)), (3, 4, 6), Rule(nesterov=True), "w"),
    "an empty shard": ((3,), (Shard(1),), (4, 2), Rule(cautious=True), "w"),
    "a convolution as one matrix": ((2,), (Shard(2),), (4, 2, 3, 3), Rule(flatten=True), "w"),
    "gate and up apart": ((3,), (Shard(1),), (2, 10, 4), Rule(num_row_blocks=2), GATE_UP),
    "no scale": ((2,), (Replicate(),), (4, 6), Rule(adjust_lr=None), GATE_UP),
}  # fmt: skip


@pytest.mark.parametrize("gate", [None, torch.tensor(True), torch.tensor(False)], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_each_matrix_is_updated_as_by_one_process(case, gate) -> None:
    # Sent and orthogonalized in float32, so to its precision and no better.
    for error in run_threads(prod(case[0]), update, *case, gate):
        assert error < 1e-6


def test_only_muons_groups_are_updated_and_every_phase_is_timed() -> None:
    weights = [nn.Parameter(torch.ones(3, 4)) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.eye(3, 4)
    momenta = [torch.zeros(3, 4) for _ in weights]
    specs, meshes = describe_parameters([("other", weights[0]), ("w", weights[1])])
    rule = Rule(lr=0.5, weight_decay=0.0, adjust_lr=None)
    other = {**group_of(rule, weights[:1]), "algorithm": "adamw"}
    inputs = StepInputs(
        weights, momenta.__getitem__, [other, group_of(rule, weights[1:])], [None, None], None
    )
    timer = PhaseTimer(torch.device("cpu"))
    with torch.no_grad():
        PerMatrixStep(specs, meshes, timer, torch.sign, split_gate_up=False).run(inputs)
    assert torch.equal(weights[0], torch.ones(3, 4))
    assert torch.equal(weights[1], 1 - 0.5 * torch.eye(3, 4))
    assert torch.equal(momenta[1], torch.eye(3, 4))
    timer.end_step()
    assert all(milliseconds > 0 for milliseconds in timer.last_step.read().values())
