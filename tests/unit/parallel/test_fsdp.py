import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.meshes import one_rank_mesh
from tests.support.networks import moe_architecture, random_model
from trainer.config.parallel import ParallelConfig
from trainer.model import setup_model
from trainer.model.experts import Experts
from trainer.parallel.fsdp import (
    describe_expert_shards,
    expert_shard_dim,
    split_experts,
    units_alone,
)
from trainer.parallel.mesh import build_mesh


@pytest.mark.parametrize(
    ("local_shape", "num_shards", "dim"),
    [((4, 64, 32), 4, 0), ((4, 64, 32), 8, 1), ((6, 64, 32), 4, 0), ((4, 63, 32), 8, 0)],
    ids=["fits", "too-few-experts", "uneven-but-enough", "dim-1-uneven"],
)
def test_experts_split_over_dim_1_only_when_there_are_too_few(
    local_shape: tuple[int, ...], num_shards: int, dim: int
) -> None:
    assert expert_shard_dim(local_shape, num_shards) == dim


@pytest.mark.parametrize(
    ("shape", "sizes", "message"),
    [
        ((8, 6, 4), (2, 4), "2 experts on each of ep=4, then dim 0 over dp_shard_mod_ep=2"),
        ((8, 6, 4), (3, 4), "2 experts on each of ep=4, then dim 1 over dp_shard_mod_ep=3"),
        ((8, 6, 4), (4, 4), "then dim 0 over dp_shard_mod_ep=4 (2 shards are empty)"),
        ((6, 6, 4), (4, 1), "then dim 0 over dp_shard_mod_ep=4 (1 shards are empty)"),
    ],
    ids=["whole", "dim-1", "empty", "uneven"],
)
def test_empty_shards_are_reported(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], sizes: tuple[int, int], message: str
) -> None:
    class Axes:
        def __init__(self, *sizes: int) -> None:
            self.sizes = sizes

        def size(self, axis: int = 0) -> int:
            return self.sizes[axis]

    monkeypatch.setattr("trainer.parallel.fsdp.ep_mesh", lambda mesh: Axes(sizes[1]))
    monkeypatch.setattr("trainer.parallel.fsdp.expert_fsdp_mesh", lambda mesh: Axes(1, sizes[0]))
    assert message in describe_expert_shards(shape, mesh=None)  # pyright: ignore


def test_experts_are_split_before_they_have_values() -> None:
    with one_rank_mesh() as mesh:
        stack = torch.nn.Parameter(torch.empty(4, 3, 2, device="meta"))
        split = split_experts(stack, mesh)
        assert split.shape == (4, 3, 2)
        assert isinstance(split.device_mesh, DeviceMesh)
        with pytest.raises(AssertionError, match="before they have values"):
            split_experts(torch.nn.Parameter(torch.empty(4, 3, 2)), mesh)


@pytest.mark.parametrize(
    ("num_ranks", "ep", "alone"),
    [(1, 1, "all"), (4, 4, "experts"), (4, 2, "none")],
    ids=["one rank", "experts where they lie", "experts sharded"],
)
def test_units_that_no_other_rank_shares(num_ranks: int, ep: int, alone: str) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1 % num_ranks, world_size=num_ranks)
    try:
        mesh = build_mesh(ParallelConfig(ep=ep), "cpu")
        model = setup_model(random_model(moe_architecture()), mesh)
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        experts = [module for module in units if isinstance(module, Experts)]
        assert experts
        assert units_alone(model) == {"all": units, "experts": experts, "none": []}[alone]
    finally:
        dist.destroy_process_group()
