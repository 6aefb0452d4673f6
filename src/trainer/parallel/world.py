"""The world of a run: its device, its process group from start to end, who speaks for all ranks.

Owns start-up and teardown of a run. The group itself is started by `group.py`; meshes over the
ranks are `mesh.py`'s, stop signals `signals.py`'s, hang reports `watchdog.py`'s.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from trainer.config.parallel import ParallelConfig
from trainer.errors import UserError
from trainer.parallel import group, watchdog
from trainer.seat import Seat, read_seat

logger = logging.getLogger(__name__)


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

    A group that already runs is used as it is.

    Args:
        config: `device` and `timeout_s` matter here.

    Raises:
        UserError: the device asked for does not exist, or a rank's start failed.

    Collective: the whole world; every rank must call.
    """
    place = read_seat()
    try:
        device = _pick_device(config, place)
    except UserError as error:
        group.announce_failed_start(str(error), place)
        raise
    store = None
    if not dist.is_initialized():
        store = group.start_group(place, device, timedelta(seconds=config.timeout_s))
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
    if place.size == 1 or group.missing_address():
        return place.rank == 0
    try:
        store = dist.PrefixStore("spokesman", group.rendezvous(place))
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
    if place.size == 1 or group.missing_address():
        return False
    try:
        return dist.PrefixStore("spokesman", group.rendezvous(place)).check(["speaker"])
    except dist.DistError:
        return False  # The store is gone, and with it what was said.


def announce_failed_start(message: str) -> None:
    """Tell ranks that wait in `init_world` that this one will not come, and why."""
    group.announce_failed_start(message, read_seat())


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
