from collections.abc import Generator

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support.meshes import ones_on, two_by_two_mesh
from trainer.errors import UserError
from trainer.optim.spec import AxisPlacement, MeshSpec, describe_parameters


@pytest.fixture(scope="module")
def mesh() -> Generator[DeviceMesh]:
    with two_by_two_mesh() as mesh:
        yield mesh


def test_placements_are_described_by_dim_and_factor(mesh) -> None:
    named = [
        ("x", ones_on(mesh, _StridedShard(0, split_factor=2), Shard(0))),
        ("y", ones_on(mesh, Replicate(), Shard(1))),
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
    named = [
        (str(i), ones_on(m, Replicate(), Shard(0))) for i, m in enumerate((mesh, again, other))
    ]
    specs, meshes = describe_parameters(named)
    assert specs[0].mesh == specs[1].mesh
    assert len(meshes) == 2


def test_pending_sums_are_refused_by_name(mesh) -> None:
    with pytest.raises(UserError, match=r"parameter w has placement Partial"):
        describe_parameters([("w", ones_on(mesh, Partial(), Replicate()))])
