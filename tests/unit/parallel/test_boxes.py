import itertools

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from trainer.parallel.boxes import Box, box_at, holds_first_replica, local_box, local_part

LAYOUTS = {
    "replicated": ((2, 2), (Replicate(), Replicate())),
    "sharded": ((4,), (Shard(0),)),
    "hsdp": ((2, 3), (Replicate(), Shard(1))),
    "two-dims": ((2, 3), (Shard(1), Shard(0))),
    "same-dim": ((2, 3), (Shard(0), Shard(0))),
    "experts": ((3, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    "experts-hsdp": ((2, 3, 2), (Replicate(), _StridedShard(0, split_factor=2), Shard(0))),
    "size-one-axes": ((1, 4, 1), (Replicate(), _StridedShard(0, split_factor=1), Shard(0))),
}


def all_boxes(shape, mesh_shape, placements):
    coordinates = itertools.product(*map(range, mesh_shape))
    return {place: box_at(shape, mesh_shape, placements, place) for place in coordinates}


@pytest.mark.parametrize("shape", [(12, 6), (10, 7), (4, 3), (1, 1)])
@pytest.mark.parametrize(("mesh_shape", "placements"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_boxes_cover_the_tensor_once_per_replica(shape, mesh_shape, placements):
    if shape[0] % 2:
        shape = (shape[0] * 2, shape[1])  # the ep axis holds as many experts on each rank
    count = torch.zeros(shape, dtype=torch.int64)
    for box in all_boxes(shape, mesh_shape, placements).values():
        count[box.slices] += 1
    replicas = 1
    for size, placement in zip(mesh_shape, placements, strict=True):
        replicas *= size if isinstance(placement, Replicate) else 1
    assert torch.equal(count, torch.full(shape, replicas))


@pytest.mark.parametrize("shape", [(12, 6), (4, 6)])
@pytest.mark.parametrize(("mesh_shape", "placements"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_boxes_are_those_of_torch(shape, mesh_shape, placements):
    for place, box in all_boxes(shape, mesh_shape, placements).items():
        sizes, offsets = _compute_local_shape_and_global_offset(
            shape, mesh_shape, list(place), placements
        )
        assert box.sizes == tuple(sizes)
        if not box.is_empty:
            assert box.offsets == tuple(offsets)


def test_uneven_split_leaves_late_ranks_empty():
    boxes = all_boxes((5, 2), (4,), (Shard(0),))
    assert [box.sizes[0] for box in boxes.values()] == [2, 2, 1, 0]
    assert boxes[3,].is_empty


@pytest.mark.parametrize(
    ("mesh_shape", "placements", "message"),
    [
        ((2, 2), (Shard(0), _StridedShard(0, split_factor=2)), "leave scattered rows"),
        ((2,), (_StridedShard(0, split_factor=2),), "leave scattered rows"),
        ((2,), (Partial(),), "neither a shard nor a replica"),
    ],
    ids=["strided-behind", "strided-alone", "partial"],
)
def test_placement_without_one_box_a_rank_is_refused(mesh_shape, placements, message):
    with pytest.raises(RuntimeError, match=message):
        box_at((8, 8), mesh_shape, placements, (0,) * len(mesh_shape))


def test_plain_tensor_is_one_box_that_rank_0_speaks_for():
    tensor = torch.zeros(2, 3, requires_grad=True)
    assert local_box(tensor) == Box((0, 0), (2, 3))
    assert (holds_first_replica(tensor, 0), holds_first_replica(tensor, 1)) == (True, False)


def test_local_part_shares_memory_and_needs_no_gradient():
    tensor = torch.zeros(2, requires_grad=True)
    local_part(tensor).fill_(1)
    assert tensor.tolist() == [1, 1]


def test_scalar_has_a_box_too():
    assert local_box(torch.tensor(1.0)) == Box((), ())
    assert not Box((), ()).is_empty
