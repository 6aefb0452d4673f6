"""Runs a function on several ranks that are threads: collectives without a process to spawn.

For unit tests of what ranks say to one another. Collectives run when they are called, so lifetimes
and overlap are for `spawn.py`'s real ranks.
"""

import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)


def run_threads(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0
) -> list[Any]:
    """Call `function(*args)` on every rank of a fresh group; return the results by rank.

    Raises:
        AssertionError: a rank raised or did not finish within `timeout_s`.
    """
    results: list[Any] = [None] * world_size
    errors: list[str] = []
    store = dist.HashStore()

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            results[rank] = function(*args)
        except BaseException as error:  # reported to the caller, which fails the test with it
            errors.append(f"rank {rank} failed:\n{traceback.format_exc()}")
            ProcessLocalGroup.exception_handle(error)  # frees the ranks that wait for this one
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    _install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        ranks = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(world_size)]
        for rank in ranks:
            rank.start()
        for number, rank in enumerate(ranks):
            rank.join(timeout_s)
            assert not rank.is_alive(), f"rank {number} hangs after {timeout_s} s"
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        _uninstall_threaded_pg()
    assert not errors, errors[0]
    return results
