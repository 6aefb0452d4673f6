"""The process group of a run: start, devices, errors that all ranks raise together, end.

Owns start-up and teardown and what the environment says about this rank. Meshes over the ranks
are `mesh.py`'s, stop signals `signals.py`'s, hang reports `watchdog.py`'s.
"""

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from trainer.config.parallel import ParallelConfig
from trainer.errors import UserError
from trainer.parallel import watchdog
from trainer.seat import Seat, read_seat

logger = logging.getLogger(__name__)

START_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class World:
    """This process among all of the run."""

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which speaks for all."""
        return self.rank == 0


def init_world(config: ParallelConfig) -> World:
    """Start the process group (a group of one without a launcher) and pick this rank's device.

    On GPUs the group has a gloo backend beside NCCL, so that host tensors can be reduced without
    a device in the way. A group that already runs is used as it is.

    Args:
        config: `device` and `timeout_s` matter here.

    Raises:
        UserError: the device asked for does not exist, or a rank's start failed.

    Collective: the whole world; every rank must call.
    """
    place = read_seat()
    device = _pick_device(config, place)
    store = None
    if not dist.is_initialized():
        store = _start_group(config, place, device)
    watchdog.start(place.rank, place.size, config.timeout_s, store)
    logger.info(
        "rank %d of %d on %s, %d CPU threads, torch %s",
        place.rank,
        place.size,
        device,
        torch.get_num_threads(),
        torch.__version__,
    )
    return World(place.rank, place.size, place.local_rank, device)


def close_world() -> None:
    """End the process group and the watchdog.

    Collective: the whole world, after the last collective. Not for failed runs: it would wait
    for the ranks that are gone.
    """
    watchdog.stop()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def open_world(config: ParallelConfig) -> Iterator[World]:
    """Start the world for a `with` block and close it where the block succeeds.

    A failure leaves the group alone (see `close_world`) and names this rank's phase, and that of
    the rank that lags, in the log.

    Collective: as `init_world` and `close_world`.
    """
    world = init_world(config)
    try:
        with watchdog.report_failure():
            yield world
    except BaseException:
        if world.size == 1:
            close_world()
        raise
    close_world()


def use_deterministic_algorithms(wanted: bool | None, device: torch.device) -> None:
    """Switch deterministic algorithms; unset means on a CPU yes, on a GPU no."""
    enabled = device.type == "cpu" if wanted is None else wanted
    if enabled and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(enabled)
    logger.info("deterministic algorithms: %s", "on" if enabled else "off")


def speaks_for_all(patience: timedelta) -> bool:
    """Return whether this rank should print an error that others may have too.

    Rank 0 speaks at once. Another rank waits for rank 0 to speak, and speaks itself, the first of
    those that wait, if it does not. Works before the process group starts, and after it broke.

    Args:
        patience: How long to wait for rank 0.
    """
    place = read_seat()
    if place.size == 1 or _missing_address():
        return place.rank == 0
    try:
        store = dist.PrefixStore("spokesman", _rendezvous(place))
        if place.rank != 0:
            with contextlib.suppress(dist.DistStoreError):
                store.wait(["speaker"], patience)
                return False
        return store.compare_set("speaker", "", str(place.rank)) == str(place.rank).encode()
    except dist.DistError:
        return True  # The store is gone: better said twice than never.


def another_has_spoken() -> bool:
    """Return whether another rank has printed an error of the user's and ended.

    What this rank then runs into, such as a collective that fails, is an echo of that.
    """
    place = read_seat()
    if place.size == 1 or _missing_address():
        return False
    try:
        return dist.PrefixStore("spokesman", _rendezvous(place)).check(["speaker"])
    except dist.DistError:
        return False  # The store is gone, and with it what was said.


def announce_failed_start(message: str) -> None:
    """Tell ranks that wait in `init_world` that this one will not come, and why."""
    place = read_seat()
    if place.size > 1 and not _missing_address():
        store = dist.PrefixStore("start", _rendezvous(place))
        store.set(str(place.rank), message)


def _pick_device(config: ParallelConfig, place: Seat) -> torch.device:
    num_gpus = torch.cuda.device_count()
    if config.device == "cpu" or (config.device == "auto" and num_gpus == 0):
        return torch.device("cpu")
    if num_gpus <= place.local_rank:
        raise UserError(
            f"parallel.device='{config.device}': local rank {place.local_rank} has no GPU, "
            f"{num_gpus} found; start fewer processes per node, or set parallel.device = 'cpu'"
        )
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


def _start_group(config: ParallelConfig, place: Seat, device: torch.device) -> dist.Store:
    timeout = timedelta(seconds=config.timeout_s)
    store = _rendezvous(place) if place.size > 1 else dist.HashStore()
    _wait_for_all(dist.PrefixStore("start", store), place)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=dist.PrefixStore("group", store),
        rank=place.rank,
        world_size=place.size,
        timeout=timeout,
    )
    # Communicators made lazily, in an order that differs by rank, can deadlock.
    dist.all_reduce(torch.zeros(1, device=device))
    return store


def _missing_address() -> str:
    """Return which variable of the meeting place of all ranks is not set; empty if none."""
    unset = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    return " and ".join(unset)


@functools.cache
def _rendezvous(place: Seat) -> dist.Store:
    """Return the launcher's store; one connection serves the process for all its life.

    Raises:
        UserError: the environment does not say where it is.
    """
    if missing := _missing_address():
        raise UserError(
            f"{missing} is not set in the environment, and WORLD_SIZE={place.size} ranks must meet "
            "there; launch with torchrun, or set it to that of rank 0"
        )
    store, _, _ = next(dist.rendezvous("env://", place.rank, place.size, timeout=START_TIMEOUT))
    return store


def _wait_for_all(store: dist.Store, place: Seat) -> None:
    """Wait until every rank is here, or raise what kept one from coming."""
    store.set(str(place.rank), "")
    for rank in range(place.size):
        try:
            message = store.get(str(rank)).decode()
        except dist.DistStoreError:
            raise RuntimeError(
                f"rank {rank} did not start within {START_TIMEOUT}: see the log of its node"
            ) from None
        if message:
            raise UserError(message)
