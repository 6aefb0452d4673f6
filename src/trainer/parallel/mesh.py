"""The device mesh: which axes the ranks form, and the submeshes that parameters live on.

Owns sizes and names of the axes. Does not own start-up of the process group (`group.py`) nor what
is sharded over which axis (`fsdp.py`, read next).
"""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from trainer.config.parallel import ParallelConfig
from trainer.errors import UserError
from trainer.parallel.group import announce_failed_start, start_group
from trainer.seat import Seat, read_seat

DP_REPLICATE = "dp_replicate"
DP_SHARD = "dp_shard"
DP_SHARD_MOD_EP = "dp_shard_mod_ep"
EP = "ep"

DEVICE_TYPES = ("cpu", "cuda")


@dataclass(frozen=True)
class MeshSizes:
    """Sizes of the axes for one world size; `dp_shard` is `dp_shard_mod_ep x ep`."""

    dp_replicate: int
    dp_shard_mod_ep: int
    ep: int

    @property
    def dp_shard(self) -> int:
        """Ranks that dense weights are sharded over."""
        return self.dp_shard_mod_ep * self.ep


def resolve_sizes(config: ParallelConfig, world_size: int) -> MeshSizes:
    """Fit the `parallel` section to a world size; needs no ranks.

    Raises:
        UserError: the sizes do not multiply to `world_size`, or `ep` does not divide `dp_shard`.
    """
    dp_replicate, dp_shard = config.dp_replicate, config.dp_shard
    if dp_shard == -1:
        if world_size % dp_replicate:
            raise UserError(
                f"parallel.dp_replicate={dp_replicate} does not divide the world of {world_size} "
                "ranks: choose a divisor, or start another number of ranks"
            )
        dp_shard = world_size // dp_replicate
    if dp_replicate * dp_shard != world_size:
        raise UserError(
            f"parallel.dp_replicate={dp_replicate} x parallel.dp_shard={dp_shard} makes "
            f"{dp_replicate * dp_shard} ranks, but {world_size} were started: set "
            "parallel.dp_shard = -1 to take what is left, or start as many ranks"
        )
    if dp_shard % config.ep:
        raise UserError(
            f"parallel.ep={config.ep} does not divide parallel.dp_shard={dp_shard}: "
            "choose an ep that divides dp_shard"
        )
    return MeshSizes(dp_replicate, dp_shard // config.ep, config.ep)


def build_mesh(config: ParallelConfig, device_type: str) -> DeviceMesh:
    """Build the mesh over all ranks, with axes `dp_replicate`, `dp_shard_mod_ep`, `ep`.

    Every axis exists, of size 1 where nothing is split, so one code path serves any number of
    ranks. In a script that has started no process group, one is: of the ranks that torchrun
    started, or of this process alone.

    Args:
        config: The `parallel` section.
        device_type: "cpu" or "cuda".

    Raises:
        UserError: the section does not fit the number of ranks, or there is no such device.

    Collective: all ranks; creates the group of every axis, bounded by `parallel.timeout_s`, and
        runs one all-reduce in each, always in the same order.
    """
    timeout = timedelta(seconds=config.timeout_s)
    if not dist.is_initialized():
        seat = _script_seat()
        try:
            device = _script_device(device_type, seat)
        except UserError as error:
            announce_failed_start(str(error), seat)
            raise
        start_group(seat, device, timeout)
    sizes = resolve_sizes(config, dist.get_world_size())
    mesh = init_device_mesh(
        device_type,
        (sizes.dp_replicate, sizes.dp_shard_mod_ep, sizes.ep),
        mesh_dim_names=(DP_REPLICATE, DP_SHARD_MOD_EP, EP),
    )
    groups = [*mesh.get_all_groups(), dense_mesh(mesh).get_group(DP_SHARD)]
    _limit(groups, timeout)
    _warm_up(groups, device_type)
    return mesh


def dense_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the (`dp_replicate`, `dp_shard`) mesh of everything but experts.

    Collective: the first call, in `build_mesh`, creates the group of `dp_shard`; later ones do not.
    """
    # Slicing `dp_shard` off the root is deprecated (torch 2.10); the root remembers the flat mesh.
    flat = mesh[DP_SHARD_MOD_EP, EP]._flatten(DP_SHARD)
    return DeviceMesh._concatenate([mesh[DP_REPLICATE], flat])


def expert_fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the (`dp_replicate`, `dp_shard_mod_ep`) mesh that FSDP shards local experts over."""
    return mesh[DP_REPLICATE, DP_SHARD_MOD_EP]


def ep_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the `ep` axis, over which each rank holds its own experts."""
    return mesh[EP]


def _limit(groups: list[dist.ProcessGroup], timeout: timedelta) -> None:
    """Let collectives of `groups` take no longer than `timeout`.

    A mesh gives its groups torch's default (10 or 30 minutes) and takes no other for all backends;
    torchtitan sets it in the same way.
    """
    for group in groups:
        # torch's `fake` backend, of planning and benchmarks, has nothing to wait for.
        if dist.get_backend(group) != "fake":
            _set_pg_timeout(timeout, group)


def _warm_up(groups: list[dist.ProcessGroup], device_type: str) -> None:
    """Use every group once, in one order: communicators made lazily can deadlock over nodes."""
    for group in groups:
        dist.all_reduce(torch.zeros(1, device=device_type), group=group)


def _script_seat() -> Seat:
    seat = read_seat()
    world_size = os.environ.get("WORLD_SIZE", "1")
    if str(seat.size) != world_size:
        raise RuntimeError(
            f"WORLD_SIZE={world_size} but there is no RANK: start the script with torchrun, or "
            "unset WORLD_SIZE"
        )
    return seat


def _script_device(device_type: str, seat: Seat) -> torch.device:
    if device_type not in DEVICE_TYPES:
        raise UserError(f"device_type={device_type!r}: must be one of {', '.join(DEVICE_TYPES)}")
    if device_type != "cuda":
        return torch.device(device_type)
    if seat.local_rank >= torch.cuda.device_count():
        raise UserError(
            f"device_type='cuda': local rank {seat.local_rank} has no GPU, "
            f"{torch.cuda.device_count()} found; start fewer processes per node, or give 'cpu'"
        )
    torch.cuda.set_device(seat.local_rank)
    return torch.device("cuda", seat.local_rank)
