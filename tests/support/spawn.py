"""Runs a function on several gloo ranks with a time limit: a hang is a failure."""

import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 240.0,
    backend: str = "gloo",
) -> list[Any]:
    """Call `function(*args)` on every rank of a fresh group; return the results by rank.

    With NCCL each rank gets the GPU of its number, and gloo beside it for host tensors.

    `function` must be importable (module level), its result picklable and without tensors: their
    shared memory is gone with the rank that made them.

    Raises:
        AssertionError: a rank raised, died, or did not finish within `timeout_s`.
    """
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = [
            context.Process(
                target=_run_rank,
                args=(rank, world_size, store, timeout_s, backend, results, function, args),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            return _collect(ranks, results, timeout_s)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _collect(ranks: list[Any], results: Any, timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    by_rank: dict[int, Any] = {}
    while len(by_rank) < len(ranks):
        late = [rank for rank in range(len(ranks)) if rank not in by_rank]
        # Asked before the queue is: a rank says its word first, and may then die of its ending.
        dead = [rank for rank in late if ranks[rank].exitcode is not None]
        try:
            rank, value, error = results.get(timeout=0.2)
        except queue.Empty:
            assert not dead, f"ranks {dead} died without a word"
            assert time.monotonic() < deadline, f"ranks {late} hang after {timeout_s} s"
            continue
        assert error is None, f"rank {rank} failed:\n{error}"
        by_rank[rank] = value
    return [by_rank[rank] for rank in range(len(ranks))]


def _run_rank(
    rank: int,
    world_size: int,
    store: str,
    timeout_s: float,
    backend: str,
    results: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo" if backend == "gloo" else f"cpu:gloo,cuda:{backend}",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        value, error = function(*args), None
    except BaseException:  # reported to the parent, which fails the test with it
        value, error = None, traceback.format_exc()
    results.put((rank, value, error))
    results.close()
    results.join_thread()
    # No destroy_process_group: after a failure on one rank it would wait for the others.
