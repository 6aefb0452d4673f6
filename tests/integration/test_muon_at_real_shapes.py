"""One rank of eight steps Qwen3-30B-A3B at its real shapes: a fake group, tensors without data."""

from collections.abc import Generator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.qwen3_moe import qwen3_30b_a3b
from trainer.config.optim import MuonConfig
from trainer.optim import MuonOptions
from trainer.optim.layout import local_shape
from trainer.optim.muon import Muon
from trainer.optim.setup import group_settings, plan_groups
from trainer.optim.spec import ParameterSpec

RANK, NUM_LAYERS = 3, 2


@pytest.fixture(params=[(1, 8, 8), (1, 8, 2), (2, 4, 2)], ids=["ep8", "ep2", "hsdp ep2"])
def sizes(request: pytest.FixtureRequest) -> Generator[tuple[int, int, int]]:
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=8)
    yield request.param
    dist.destroy_process_group()


def _placements(spec: ParameterSpec) -> list[Placement]:
    found: list[Placement] = []
    for placement in spec.placements:
        if placement.dim is None:
            found.append(Replicate())
        elif placement.split_factor == 1:
            found.append(Shard(placement.dim))
        else:
            found.append(_StridedShard(placement.dim, split_factor=placement.split_factor))
    return found


def _parameter(spec: ParameterSpec, meshes: dict[tuple[str, ...], DeviceMesh]) -> nn.Parameter:
    assert spec.mesh is not None
    mesh = meshes[spec.mesh.axes]
    stride = torch.empty(spec.shape, device="meta").stride()

    def make() -> DTensor:
        return DTensor.from_local(
            torch.empty(local_shape(spec)),
            mesh,
            _placements(spec),
            run_check=False,
            shape=torch.Size(spec.shape),
            stride=stride,
        )

    parameter = nn.Parameter(make())
    parameter.grad = make()
    return parameter


def test_the_step_follows_the_plan(sizes: tuple[int, int, int]) -> None:
    dp_replicate, dp_shard, ep = sizes
    dense = init_device_mesh(
        "cpu", (dp_replicate, dp_shard), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    expert = init_device_mesh(
        "cpu",
        (dp_replicate, dp_shard // ep, ep),
        mesh_dim_names=("dp_replicate", "dp_shard_mod_ep", "ep"),
    )
    meshes = {mesh.mesh_dim_names: mesh for mesh in (dense, expert)}
    specs = qwen3_30b_a3b(
        RANK, dp_replicate=dp_replicate, dp_shard=dp_shard, ep=ep, num_layers=NUM_LAYERS
    )
    config = MuonConfig()
    with FakeTensorMode(allow_non_fake_inputs=True):
        groups = [
            {
                "name": group.name,
                "params": [(s.name, _parameter(s, meshes)) for s in group.parameters],
                **group_settings(group.name, config),
            }
            for group in plan_groups(config, specs)
        ]
    # Outside the mode, so that meshes stay real; whatever touches a parameter is fake.
    optimizer = Muon(groups, options=MuonOptions())
    optimizer.step(finite=torch.ones((), dtype=torch.bool))
    assert optimizer._exchange.num_launched == optimizer.plan.num_exchanges()
    local = [bucket for bucket in optimizer.plan.buckets if bucket.layout == "stack"]
    held = 128 // dp_shard * NUM_LAYERS
    assert [sum(piece.num_matrices for piece in bucket.pieces) for bucket in local] == [held] * 2
    owned = [sum(bucket.owned_here(chunk) for chunk in bucket.chunks) for bucket in local]
    assert owned == [held // dp_replicate] * 2
