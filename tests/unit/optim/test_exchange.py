import weakref
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.support.threads import run_threads
from trainer.optim import exchange as exchange_module
from trainer.optim.exchange import Exchange, axes_group, make_groups, warm
from trainer.optim.plan import PlannedGroup, PlanOptions, build_plan
from trainer.optim.spec import AxisPlacement, MeshSpec, ParameterSpec
from trainer.optim.timing import PhaseTimer

CPU = torch.device("cpu")
R, S0, S1 = AxisPlacement(), AxisPlacement(0), AxisPlacement(1)
# Elements from rank (row) to rank (column): uneven, some none.
SIZES = [[3, 0, 1], [2, 2, 0], [0, 5, 4]]


def message(sender, receiver) -> torch.Tensor:
    return 100.0 * sender + 10.0 * receiver + torch.arange(SIZES[sender][receiver])


def all_to_all():
    rank, timer = dist.get_rank(), PhaseTimer(CPU)
    exchange = Exchange(CPU, timer)
    transfer = exchange.launch_all_to_all(
        torch.cat([message(rank, to) for to in range(3)]),
        SIZES[rank],
        [SIZES[sender][rank] for sender in range(3)],
        dist.group.WORLD,
    )
    received = exchange.wait(transfer)
    timer.end_step()
    times = timer.last_step.read()
    assert times["optim/exchange_ms"] >= times["optim/exchange_exposed_ms"] > 0
    return received.tolist(), exchange.num_launched


def test_every_part_reaches_its_rank_in_the_order_of_senders() -> None:
    for rank, (received, num_launched) in enumerate(run_threads(3, all_to_all)):
        assert received == torch.cat([message(sender, rank) for sender in range(3)]).tolist()
        assert num_launched == 1


def gather():
    exchange = Exchange(CPU, PhaseTimer(CPU))
    part = torch.arange(2.0) + 10 * dist.get_rank()
    return exchange.wait(exchange.launch_all_gather(part, dist.group.WORLD)).tolist()


def test_parts_are_gathered_in_the_order_of_ranks() -> None:
    assert run_threads(3, gather) == [[0, 1, 10, 11, 20, 21]] * 3


def is_send_buffer_kept():
    exchange = Exchange(CPU, PhaseTimer(CPU))
    send = torch.ones(2)
    alive = weakref.ref(send)
    transfer = exchange.launch_all_to_all(send, [2], [2], dist.group.WORLD)
    del send
    was_kept = alive() is not None
    exchange.wait(transfer)
    del transfer
    return was_kept, alive() is None


def test_a_transfer_keeps_what_it_sends_and_no_longer() -> None:
    assert run_threads(1, is_send_buffer_kept) == [(True, True)]


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

    monkeypatch.setattr(exchange_module, "warm", record)
    made = run_threads(4, groups_of, [(R, S0), (S1, R), (R, S0), (R, R)])
    # The second bucket's groups are the first's, swapped.
    assert made == [[(True, True), (True, True), (False, True)]] * 4
    for rank in range(4):
        along_a, along_b = (rank % 2, rank % 2 + 2), (rank // 2 * 2, rank // 2 * 2 + 1)
        assert warmed[rank] == [along_b, along_a, (0, 1, 2, 3)]


def groups_of_a_reversed_mesh():
    mesh = DeviceMesh("cpu", [1, 0], mesh_dim_names=("a",))
    mesh_spec = MeshSpec(("a",), (2,), tuple(mesh.get_coordinate()))
    with pytest.raises(RuntimeError, match="build the mesh with ranks in ascending order"):
        make_groups(plan_of(mesh_spec, (S0,)), {mesh_spec: mesh})


def test_a_mesh_whose_groups_are_ordered_otherwise_is_refused_on_all_ranks() -> None:
    run_threads(2, groups_of_a_reversed_mesh)
