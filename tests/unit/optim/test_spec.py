from collections.abc import Generator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer.errors import UserError
from trainer.optim.spec import AxisPlacement, MeshSpec, describe_parameters


@pytest.fixture(scope="module")
def mesh() -> Generator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    dist.destroy_process_group()


def on(mesh, *placements) -> DTensor:
    return DTensor.from_local(torch.ones(2, 4), mesh, placements, run_check=False)


def test_placements_are_described_by_dim_and_factor(mesh) -> None:
    named = [
        ("x", on(mesh, _StridedShard(0, split_factor=2), Shard(0))),
        ("y", on(mesh, Replicate(), Shard(1))),
        ("z", torch.ones(3, dtype=torch.bfloat16)),
    ]
    (x, y, z), meshes = describe_parameters(named)
    assert x.placements == (AxisPlacement(0, 2), AxisPlacement(0))
    assert y.placements == (AxisPlacement(), AxisPlacement(1))
    assert x.mesh == y.mesh == MeshSpec(("a", "b"), (2, 2), (1, 0))
    assert (z.mesh, z.dtype) == (None, "bfloat16")
    assert list(meshes.values()) == [mesh]


def test_meshes_of_other_ranks_are_told_apart(mesh) -> None:
    other = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("a", "b"))
    again = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=("a", "b"))
    named = [(str(i), on(m, Replicate(), Shard(0))) for i, m in enumerate((mesh, again, other))]
    specs, meshes = describe_parameters(named)
    assert specs[0].mesh == specs[1].mesh
    assert len(meshes) == 2


def test_pending_sums_are_refused_by_name(mesh) -> None:
    with pytest.raises(UserError, match=r"parameter w has placement Partial"):
        describe_parameters([("w", on(mesh, Partial(), Replicate()))])
