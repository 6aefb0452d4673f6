import pytest
import torch
import torch.distributed as dist

from tests.support.meshes import one_rank_mesh
from trainer.config.parallel import ParallelConfig
from trainer.errors import UserError
from trainer.parallel.mesh import (
    MeshSizes,
    build_mesh,
    dense_mesh,
    ep_mesh,
    expert_fsdp_mesh,
    resolve_sizes,
)


@pytest.mark.parametrize(
    ("config", "world_size", "expected"),
    [
        ({}, 1, MeshSizes(1, 1, 1)),
        ({"ep": 4}, 8, MeshSizes(1, 2, 4)),
        ({"dp_replicate": 2}, 8, MeshSizes(2, 4, 1)),
        ({"dp_replicate": 2, "dp_shard": 4, "ep": 2}, 8, MeshSizes(2, 2, 2)),
    ],
    ids=["laptop", "ep", "hsdp", "all"],
)
def test_sizes_multiply_to_the_world(
    config: dict[str, int], world_size: int, expected: MeshSizes
) -> None:
    sizes = resolve_sizes(ParallelConfig.model_validate(config), world_size)
    assert sizes == expected
    assert sizes.dp_replicate * sizes.dp_shard == world_size


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"dp_replicate": 3}, r"parallel.dp_replicate=3 does not divide the world of 8"),
        ({"dp_shard": 4}, r"parallel.dp_replicate=1 x parallel.dp_shard=4 makes 4 ranks, but 8"),
        ({"ep": 3}, r"parallel.ep=3 does not divide parallel.dp_shard=8"),
    ],
    ids=["replicate", "product", "ep"],
)
def test_sizes_that_do_not_fit_are_refused(config: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve_sizes(ParallelConfig.model_validate(config), 8)


def test_every_axis_exists_on_one_rank_and_no_group_is_made_twice() -> None:
    with one_rank_mesh() as mesh:
        assert mesh.mesh_dim_names == ("dp_replicate", "dp_shard_mod_ep", "ep")
        assert dense_mesh(mesh).mesh_dim_names == ("dp_replicate", "dp_shard")
        assert expert_fsdp_mesh(mesh).mesh_dim_names == ("dp_replicate", "dp_shard_mod_ep")
        assert ep_mesh(mesh).mesh_dim_names == ("ep",)
        assert dense_mesh(mesh) == dense_mesh(mesh)
        assert dense_mesh(mesh).get_group("dp_shard") is dense_mesh(mesh).get_group("dp_shard")


@pytest.mark.parametrize(
    ("device_type", "message"),
    [
        ("cuda", r"device_type='cuda': local rank 0 has no GPU, 0 found; .* or give 'cpu'"),
        ("gpu", "device_type='gpu': must be one of cpu, cuda"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, device_type: str, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match=message):
        build_mesh(ParallelConfig(), device_type)
    assert not dist.is_initialized()


def test_a_mesh_of_many_ranks_needs_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="WORLD_SIZE=2 but there is no RANK"):
        build_mesh(ParallelConfig(), "cpu")
