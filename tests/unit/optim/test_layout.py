from itertools import product

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from tests.support.sharding import cut
from trainer.errors import UserError
from trainer.optim.layout import lay_out, local_shape, local_slices
from trainer.optim.spec import AxisPlacement, MeshSpec, ParameterSpec

R = AxisPlacement()


def spec(shape, sizes, placements, coordinate=None, name="layer.weight"):
    axes = tuple(f"axis{i}" for i in range(len(sizes)))
    mesh = MeshSpec(axes, sizes, coordinate or (0,) * len(sizes))
    return ParameterSpec(name, shape, "float32", mesh, placements)


def torch_placement(placement: AxisPlacement) -> Placement:
    if placement.dim is None:
        return Replicate()
    if placement.split_factor == 1:
        return Shard(placement.dim)
    return _StridedShard(placement.dim, split_factor=placement.split_factor)


@pytest.mark.parametrize(
    ("shape", "sizes", "placements"),
    [
        ((16, 8), (4,), (AxisPlacement(0),)),
        ((10, 6), (4,), (AxisPlacement(0),)),
        ((3, 5), (4,), (AxisPlacement(0),)),
        ((3, 5), (4,), (AxisPlacement(1),)),
        ((12, 4, 4), (2, 2), (AxisPlacement(0, 2), AxisPlacement(0))),
        ((6, 4, 4), (2, 2), (AxisPlacement(0, 2), AxisPlacement(0))),
        ((9, 4, 4), (3, 3), (AxisPlacement(0, 3), AxisPlacement(0))),
        ((2, 4, 4), (2, 2), (AxisPlacement(0, 2), AxisPlacement(0))),
        ((5, 4, 4), (2, 3), (AxisPlacement(1), AxisPlacement(0))),
    ],
    ids=str,
)
def test_shards_are_dealt_as_torch_deals_them(shape, sizes, placements) -> None:
    full = torch.arange(torch.Size(shape).numel()).view(shape)
    for coordinate in product(*(range(size) for size in sizes)):
        one = spec(shape, sizes, placements, coordinate)
        expected = cut(full, sizes, coordinate, [torch_placement(p) for p in placements])
        assert local_shape(one) == tuple(expected.shape)
        found = full
        for dim, indices in enumerate(local_slices(one)):
            found = found.index_select(dim, torch.tensor(indices, dtype=torch.long))
        assert torch.equal(found, expected)


def test_a_matrix_without_a_mesh_is_whole() -> None:
    layout = lay_out(ParameterSpec("w", (3, 5), "float32"), flatten=False)
    assert (layout.kind, layout.rows, layout.cols, layout.num_matrices) == ("whole", 3, 5, 1)


def test_strided_shards_of_experts_are_a_split_stack() -> None:
    placements = (R, AxisPlacement(0, 4), AxisPlacement(0))
    layout = lay_out(spec((16, 6, 4), (1, 2, 4), placements), flatten=False)
    assert layout.kind == "stack"
    assert layout.num_matrices == 2


def test_axes_of_one_rank_do_not_count() -> None:
    layout = lay_out(spec((16, 6), (1, 1), (AxisPlacement(0), AxisPlacement(1))), flatten=False)
    assert layout.kind == "whole"


def test_rows_cut_over_one_axis_and_stack_over_another() -> None:
    layout = lay_out(spec((4, 10, 6), (4, 2), (AxisPlacement(1), AxisPlacement(0))), flatten=False)
    assert (layout.kind, layout.split_axis, layout.split_dim) == ("matrix", 0, 0)
    assert layout.slab_bounds == ((0, 3), (3, 6), (6, 9), (9, 10))
    assert layout.num_matrices == 2


def test_flattening_turns_a_split_stack_into_cut_rows() -> None:
    one = spec((8, 3, 2, 2), (4,), (AxisPlacement(0),))
    assert lay_out(one, flatten=False).kind == "stack"
    layout = lay_out(one, flatten=True)
    assert (layout.kind, layout.rows, layout.cols, layout.num_matrices) == ("matrix", 8, 12, 1)


def test_matrices_cut_over_two_axes_are_refused_by_name() -> None:
    one = spec((16, 8), (2, 2), (AxisPlacement(0), AxisPlacement(1)))
    with pytest.raises(
        UserError, match=r"layer\.weight of shape \[16, 8\].*Shard\(0\), Shard\(1\)"
    ):
        lay_out(one, flatten=False)
