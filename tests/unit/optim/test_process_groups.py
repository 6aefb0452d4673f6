from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.support.threads import run_threads
from trainer.errors import UserError
from trainer.optim import Muon, process_groups
from trainer.optim.plan import PlannedGroup, PlanOptions, build_plan
from trainer.optim.process_groups import axes_group, make_groups, warm
from trainer.optim.spec import AxisPlacement, MeshSpec, ParameterSpec

R, S0, S1 = AxisPlacement(), AxisPlacement(0), AxisPlacement(1)


def ranks_along(sizes, axes):
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b", "c"))
    return dist.get_process_group_ranks(axes_group(mesh, axes))


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)], ids=str)
def test_a_group_holds_the_ranks_that_differ_on_its_axes_alone(axes) -> None:
    sizes = (2, 2, 2)
    coordinates = list(product(*map(range, sizes)))
    for mine, found in zip(coordinates, run_threads(8, ranks_along, sizes, axes), strict=True):
        assert found == [
            rank
            for rank, other in enumerate(coordinates)
            if all(other[axis] == mine[axis] for axis in range(3) if axis not in axes)
        ]


def plan_of(mesh_spec, *placements):
    specs = tuple(
        ParameterSpec(f"p{i}", (4, 4), "float32", mesh_spec, places)
        for i, places in enumerate(placements)
    )
    group = PlannedGroup("dense", "muon", specs)
    return build_plan([group], PlanOptions("float32"), lambda shape: ("dense", ""))


def groups_of(placements):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    mesh_spec = MeshSpec(("a", "b"), (2, 2), tuple(mesh.get_coordinate()))
    groups = make_groups(plan_of(mesh_spec, *placements), {mesh_spec: mesh})
    return [(g.shards is not None, g.replicas is not None) for g in groups]


def test_each_group_is_warmed_once_in_the_order_of_buckets(monkeypatch) -> None:
    warmed = {rank: [] for rank in range(4)}

    def record(group, device_type) -> None:
        warmed[dist.get_rank()].append(tuple(dist.get_process_group_ranks(group)))
        warm(group, device_type)

    monkeypatch.setattr(process_groups, "warm", record)
    made = run_threads(4, groups_of, [(R, S0), (S1, R), (R, S0), (R, R)])
    # The second bucket's groups are the first's, swapped.
    assert made == [[(True, True), (True, True), (False, True)]] * 4
    for rank in range(4):
        along_a, along_b = (rank % 2, rank % 2 + 2), (rank // 2 * 2, rank // 2 * 2 + 1)
        assert warmed[rank] == [along_b, along_a, (0, 1, 2, 3)]


def refusal_of(ranks, placements):
    """Return what a rank hears of a mesh of two axes."""
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b"))
    mesh_spec = MeshSpec(("a", "b"), (2, 2), tuple(mesh.get_coordinate()))
    try:
        make_groups(plan_of(mesh_spec, placements), {mesh_spec: mesh})
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("ranks", "placements", "is_refused"),
    [
        ([[1, 0], [3, 2]], (R, S0), True),
        # Along one axis ranks ascend; both together are dealt 0, 2, 1, 3.
        ([[0, 2], [1, 3]], (R, S0), False),
        ([[0, 2], [1, 3]], (R, R), True),
    ],
    ids=str,
)
def test_a_mesh_whose_ranks_do_not_ascend_is_refused_on_all_ranks(
    ranks, placements, is_refused
) -> None:
    message = f"the mesh {ranks} does not have its ranks in ascending order"
    for heard in run_threads(4, refusal_of, ranks, placements):
        assert (heard or "").startswith(message) == is_refused


def hear_of_a_shard_that_only_one_rank_cannot_use():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    shard = torch.ones(3 if dist.get_rank() else 2, 4)
    weight = DTensor.from_local(
        shard, mesh, (Shard(0),), run_check=False, shape=torch.Size((4, 4)), stride=(4, 1)
    )
    with pytest.raises(UserError) as refused:
        Muon([("weight", torch.nn.Parameter(weight))])
    return str(refused.value)


def hear_of_a_mesh_that_one_rank_is_not_on():
    world = init_device_mesh("cpu", (3,), mesh_dim_names=("a",))
    part = DeviceMesh("cpu", [0, 1], mesh_dim_names=("b",))
    named = [
        (name, torch.nn.Parameter(DTensor.from_local(torch.ones(2, 4), mesh, (Replicate(),))))
        for name, mesh in (("everywhere", world), ("somewhere", part))
    ]
    with pytest.raises(UserError) as refused:
        Muon(named)
    return str(refused.value)


def test_a_rank_without_a_part_of_a_parameter_is_heard_by_all() -> None:
    first, second, third = run_threads(3, hear_of_a_mesh_that_one_rank_is_not_on)
    assert third.startswith("parameter somewhere lies on the mesh [0, 1], which does not hold this")
    assert first == second == f"rank 2: {third}"


def test_what_one_rank_refuses_all_refuse_before_a_collective() -> None:
    first, second = run_threads(2, hear_of_a_shard_that_only_one_rank_cannot_use)
    assert second.startswith("parameter weight of shape [4, 4] has a local shard of shape [3, 4]")
    assert first == f"rank 1: {second}"
