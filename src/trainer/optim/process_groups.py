"""The process groups of an optimizer: made and warmed in one fixed order, on all ranks or on none.

Owns groups over axes of meshes, and the agreement that comes before the first of them. What runs on
groups is in `exchange.py` and `presence.py`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trainer.errors import UserError
from trainer.optim.bucket import Bucket
from trainer.optim.plan import Plan
from trainer.optim.spec import MeshSpec

T = TypeVar("T")


@dataclass(frozen=True)
class BucketGroups:
    """The process groups of a bucket; None where the plan has one rank."""

    shards: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None


def together(meshes: Mapping[MeshSpec, DeviceMesh], function: Callable[[], T]) -> T:
    """Return `function()`, run on every rank; what it refuses on one, all refuse.

    A shard or a machine may differ from the others', and a rank that raised alone would leave them
    waiting for it in the collectives that follow.

    Args:
        meshes: The ranks, which hear of each other once for each set of them, in order; of sets
            that overlap only in part, one that comes before does not hear of one that comes after.
        function: Without collectives.

    Raises:
        UserError: `function` raised it on a rank of the meshes.

    Collective: after `function`, an all-reduce of one element over each set of ranks, and where
    one refused a gathering of what it says; all ranks of the meshes.
    """
    results: list[T] = []
    refusal: UserError | None = None
    try:
        results.append(function())
    except UserError as error:
        refusal = error
    for mesh in {spec.members: mesh for spec, mesh in meshes.items() if mesh.size() > 1}.values():
        refusal = _spread(refusal, mesh)
    if refusal is not None:
        raise refusal
    return results[0]


def _spread(refusal: UserError | None, mesh: DeviceMesh) -> UserError | None:
    """Return this rank's refusal, or another's where this one has none.

    Collective: as `together`, of one mesh.
    """
    group = axes_group(mesh, tuple(range(mesh.ndim)))
    flag = torch.tensor([refusal is not None], dtype=torch.int32, device=mesh.device_type)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    if not flag.item():
        return None
    heard: list[Any] = [None] * group.size()
    dist.all_gather_object(heard, None if refusal is None else str(refusal), group=group)
    messages = zip(dist.get_process_group_ranks(group), heard, strict=True)
    rank, message = next((rank, message) for rank, message in messages if message is not None)
    return refusal or UserError(f"rank {rank}: {message}")


def make_groups(plan: Plan, meshes: dict[MeshSpec, DeviceMesh]) -> list[BucketGroups]:
    """Return the process groups of each bucket, made and warmed in bucket order.

    Communicators are created at first use; created lazily inside the step, in an order that
    differs by rank, they deadlock over several nodes.

    Raises:
        UserError: a process group would order its ranks otherwise than the mesh.

    Collective: group creation and a small all-reduce on each group; every rank of every mesh.
    """
    known: dict[tuple[MeshSpec, tuple[int, ...]], dist.ProcessGroup] = {}
    return [
        BucketGroups(
            _group(bucket, _split_axes(bucket), bucket.num_shards, meshes, known),
            _group(bucket, bucket.replica_axes, bucket.num_replicas, meshes, known),
        )
        for bucket in plan.buckets
    ]


def _split_axes(bucket: Bucket) -> tuple[int, ...]:
    return () if bucket.split_axis is None else (bucket.split_axis,)


def _group(
    bucket: Bucket,
    axes: tuple[int, ...],
    size: int,
    meshes: dict[MeshSpec, DeviceMesh],
    known: dict[tuple[MeshSpec, tuple[int, ...]], dist.ProcessGroup],
) -> dist.ProcessGroup | None:
    """Return the group over some axes of a bucket's mesh, from `known` or new there.

    Collective: group creation and warming where it is new; every rank of the mesh.
    """
    if size == 1 or bucket.mesh is None:
        return None
    key = (bucket.mesh, axes)
    if key not in known:
        mesh = meshes[bucket.mesh]
        _check_order(mesh, axes)
        known[key] = axes_group(mesh, axes)
        warm(known[key], mesh.device_type)
    return known[key]


def _check_order(mesh: DeviceMesh, axes: tuple[int, ...]) -> None:
    """Check that ranks ascend along axes, as in a process group; the same on all ranks."""
    others = [axis for axis in range(mesh.ndim) if axis not in axes]
    num_ranks = math.prod(mesh.shape[axis] for axis in axes)
    lines = mesh.mesh.permute(*others, *axes).reshape(-1, num_ranks)
    if bool((lines.diff() < 0).any()):
        raise UserError(
            f"the mesh {mesh.mesh.tolist()} does not have its ranks in ascending order, as process "
            "groups do: build the mesh with ranks in ascending order"
        )


def axes_group(mesh: DeviceMesh, axes: tuple[int, ...]) -> dist.ProcessGroup:
    """Return the group of ranks that differ from this one only on some axes of a mesh.

    Collective: group creation when several axes are joined; every rank of the mesh.
    """
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    spans = [range(s) if a in axes else [coordinate[a]] for a, s in enumerate(mesh.shape)]
    return ranks_group([int(mesh.mesh[place]) for place in product(*spans)])


def ranks_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return a group of the given global ranks: the default group if that is all of them.

    Collective: group creation; the ranks named.
    """
    if len(ranks) == dist.get_world_size():
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    group: Any = dist.new_group(sorted(ranks), use_local_synchronization=True)
    return group


def warm(group: dist.ProcessGroup, device_type: str) -> None:
    """Make a group's communicator exist.

    Collective: all-reduce of one element on `group`.
    """
    dist.all_reduce(torch.zeros(1, device=device_type), group=group)
