"""The start of the process group: where ranks meet, and that none waits for one that will not come.

Owns the way from a seat to a running group. Who starts one: a run (`world.py`), or a script of the
user's through `mesh.py`.
"""

import functools
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from trainer.errors import UserError
from trainer.seat import Seat

START_TIMEOUT = timedelta(minutes=10)


def start_group(seat: Seat, device: torch.device, timeout: timedelta) -> dist.Store:
    """Start the default group, of one rank without a launcher, and return the store of its ranks.

    On GPUs it has a gloo backend beside NCCL, so that host tensors can be reduced without a device
    in the way.

    Args:
        seat: Of this process.
        device: Of this rank; a GPU is the process's current one.
        timeout: Longest duration of a collective.

    Raises:
        UserError: another rank announced why it will not come.
        RuntimeError: one did not come in time.

    Collective: every rank of the world must call; one all-reduce at the end.
    """
    store = rendezvous(seat) if seat.size > 1 else dist.HashStore()
    _wait_for_all(dist.PrefixStore("start", store), seat)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=dist.PrefixStore("group", store),
        rank=seat.rank,
        world_size=seat.size,
        timeout=timeout,
    )
    # Communicators made lazily, in an order that differs by rank, can deadlock.
    dist.all_reduce(torch.zeros(1, device=device))
    return store


def announce_failed_start(message: str, seat: Seat) -> None:
    """Tell ranks that wait in `start_group` that this one will not come, and why."""
    if seat.size > 1 and not missing_address():
        dist.PrefixStore("start", rendezvous(seat)).set(str(seat.rank), message)


def missing_address() -> str:
    """Return which variable of the meeting place of all ranks is not set; empty if none."""
    unset = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    return " and ".join(unset)


@functools.cache
def rendezvous(seat: Seat) -> dist.Store:
    """Return the launcher's store; one connection serves the process for all its life.

    Raises:
        UserError: the environment does not say where it is.
    """
    if missing := missing_address():
        raise UserError(
            f"{missing} is not set in the environment, and WORLD_SIZE={seat.size} ranks must meet "
            "there; launch with torchrun, or set it to that of rank 0"
        )
    store, _, _ = next(dist.rendezvous("env://", seat.rank, seat.size, timeout=START_TIMEOUT))
    return store


def _wait_for_all(store: dist.Store, seat: Seat) -> None:
    """Wait until every rank is here, or raise what kept one from coming."""
    store.set(str(seat.rank), "")
    for rank in range(seat.size):
        try:
            message = store.get(str(rank)).decode()
        except dist.DistStoreError:
            raise RuntimeError(
                f"rank {rank} did not start within {START_TIMEOUT}: see the log of its node"
            ) from None
        if message:
            raise UserError(message)
