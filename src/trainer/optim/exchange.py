"""Starting and finishing collectives, and the process groups they run on.

Owns the groups (made and warmed in one fixed order), the launch on a stream of its own and the
lifetime of buffers: nothing handed to a collective is freed before its wait. What the bytes mean
is in `wire.py`; when to launch is `muon.py`'s.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from trainer.optim.bucket import Bucket
from trainer.optim.plan import Plan
from trainer.optim.spec import MeshSpec
from trainer.optim.timing import Mark, PhaseTimer

try:
    from torch.distributed import all_gather_single as all_gather
except ImportError:  # torch before 2.13, whose name for it later versions deprecate
    from torch.distributed import all_gather_into_tensor as all_gather


@dataclass
class Transfer:
    """A collective under way, with every buffer it touches."""

    work: dist.Work | None
    output: Tensor
    inputs: Tensor
    start: Mark
    stop: Mark | None


@dataclass(frozen=True)
class BucketGroups:
    """The process groups of a bucket; None where the plan has one rank."""

    shards: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None


class Exchange:
    """Launches and awaits collectives, off the compute stream on a GPU."""

    def __init__(self, device: torch.device, timer: PhaseTimer) -> None:
        self._timer = timer
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.num_launched = 0
        """Collectives launched so far."""

    def launch_all_to_all(
        self,
        send: Tensor,
        send_sizes: Sequence[int],
        receive_sizes: Sequence[int],
        group: dist.ProcessGroup,
    ) -> Transfer:
        """Start sending consecutive parts of a flat buffer to the ranks of a group.

        Args:
            send: 1-D, contiguous.
            send_sizes: Elements for each rank.
            receive_sizes: Elements from each rank.
            group: Who takes part.

        Collective: all-to-all on `group`; all its ranks call, in plan order.
        """
        output = send.new_empty(sum(receive_sizes))
        sizes = list(receive_sizes), list(send_sizes)
        collective = partial(dist.all_to_all_single, output, send, *sizes)
        return self._launch(collective, output, send, group)

    def launch_all_gather(self, part: Tensor, group: dist.ProcessGroup) -> Transfer:
        """Start gathering equal 1-D parts from all ranks of a group, in rank order.

        Collective: all-gather on `group`; all its ranks call, in plan order.
        """
        output = part.new_empty(part.numel() * group.size())
        return self._launch(partial(all_gather, output, part), output, part, group)

    def _launch(
        self,
        collective: Callable[..., dist.Work | None],
        output: Tensor,
        inputs: Tensor,
        group: dist.ProcessGroup,
    ) -> Transfer:
        """Start a collective behind what the compute stream has been given so far.

        Collective: the one given, on `group`; all its ranks call, in plan order.
        """
        self.num_launched += 1
        if self._stream is None:
            begun = self._timer.mark()
            return Transfer(collective(group=group, async_op=True), output, inputs, begun, None)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            begun = self._timer.mark()
            work = collective(group=group, async_op=True)
            if work is not None:
                work.wait()  # the side stream waits, not the host
            return Transfer(None, output, inputs, begun, self._timer.mark())

    def wait(self, transfer: Transfer) -> Tensor:
        """Finish a transfer and return what was received; its input buffer may go.

        On a CPU its time runs from launch to here, an upper bound.
        """
        waiting = self._timer.mark()
        if isinstance(transfer.stop, torch.cuda.Event):
            # This transfer's end only: later ones are still to overlap with what follows.
            torch.cuda.current_stream().wait_event(transfer.stop)
        elif transfer.work is not None:
            transfer.work.wait()
        done = self._timer.mark()
        self._timer.add("exchange_exposed", waiting, done)
        self._timer.add("exchange", transfer.start, transfer.stop or done)
        return transfer.output


def make_groups(plan: Plan, meshes: dict[MeshSpec, DeviceMesh]) -> list[BucketGroups]:
    """Return the process groups of each bucket, made and warmed in bucket order.

    Communicators are created at first use; created lazily inside the step, in an order that
    differs by rank, they deadlock over several nodes.

    Raises:
        RuntimeError: a process group orders its ranks otherwise than the mesh.

    Collective: group creation and a small all-reduce on each group; every rank of every mesh.
    """
    known: dict[tuple[MeshSpec, tuple[int, ...]], dist.ProcessGroup] = {}
    groups = [
        BucketGroups(
            _group(bucket, _split_axes(bucket), bucket.num_shards, meshes, known),
            _group(bucket, bucket.replica_axes, bucket.num_replicas, meshes, known),
        )
        for bucket in plan.buckets
    ]
    for bucket, made in zip(plan.buckets, groups, strict=True):
        _check_order(made.shards, bucket.shard_rank)
        _check_order(made.replicas, bucket.replica_rank)
    return groups


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
        known[key] = axes_group(meshes[bucket.mesh], axes)
        warm(known[key], meshes[bucket.mesh].device_type)
    return known[key]


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


def _check_order(group: dist.ProcessGroup | None, rank: int) -> None:
    if group is not None and dist.get_rank(group) != rank:
        raise RuntimeError(
            f"a process group gives this rank place {dist.get_rank(group)}, the mesh gives it "
            f"{rank}: build the mesh with ranks in ascending order"
        )
