"""Writes token shards: in parallel, and from where an interrupted run stopped.

Owns the division of a source into shards, which follows from its sizes alone, and the processes.
Shards come first (`job.py`), the manifest last. Each appears whole or not at all, so whatever stops
the run, the next one makes only what is missing.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import Any

from trainer.config.pretrain import HubTextSource, TextFilesSource
from trainer.data.file_tree import existing
from trainer.data.shards.folder import begin, locked, writing
from trainer.data.shards.job import (
    ShardJob,
    ShardTime,
    TokenizeRequest,
    finished,
    opened,
    write_shard,
)
from trainer.data.shards.manifest import MANIFEST, Manifest, Shard, write_json
from trainer.data.text.encode import TokenizerIdentity, identify
from trainer.data.text.pages import NumberedPages
from trainer.data.text.sources import open_numbered
from trainer.data.tokenizer import choose_tokenizer
from trainer.errors import UserError


def tokenize(request: TokenizeRequest, report: Callable[[str], None] = print) -> Manifest:
    """Tokenize a source into a folder of shards; a folder that is complete stays as it is.

    Args:
        request: what to do.
        report: takes a line for each finished shard.

    Returns:
        The folder's manifest.

    Raises:
        UserError: the source or tokenizer cannot be read, or the folder holds shards of another
            source, tokenizer or size of shards, lies inside the source, is being written or cannot
            be.
    """
    tokenizer = choose_tokenizer(request.tokenizer, None, field="--tokenizer")
    _check_apart(request)
    identity = identify(tokenizer)
    opened.cache_clear()
    pages = open_numbered(request.source)
    jobs = _plan_jobs(request, pages, identity)
    with locked(request.folder):
        begin(request.folder, _plan(request, pages, identity, jobs), tokenizer)
        shards = _write_missing(jobs, request.num_workers, report)
        manifest = Manifest(jobs[0].dtype, identity, _described(request), shards)
        with writing(request.folder):
            write_json(request.folder / MANIFEST, manifest.to_json())
    return manifest


def _check_apart(request: TokenizeRequest) -> None:
    """Refuse shards inside the text: their tokenizer's files may look like text."""
    if not isinstance(request.source, TextFilesSource):
        return
    source = existing(request.source.path, f"SRC={request.source.path!r}")
    if source.is_dir() and request.folder.resolve().is_relative_to(source.resolve()):
        raise UserError(
            f"DST={str(request.folder)!r} lies inside SRC={request.source.path!r}, where its files "
            "might be read as text the next time: give a folder outside it"
        )


def _plan_jobs(
    request: TokenizeRequest, pages: NumberedPages, identity: TokenizerIdentity
) -> list[ShardJob]:
    per_shard = max(1, request.shard_bytes * pages.num_pages // max(1, pages.num_bytes))
    dtype = "<u2" if identity.num_ids <= 1 << 16 else "<u4"
    return [
        ShardJob(
            request,
            f"shard-{index:05d}",
            start,
            min(start + per_shard, pages.num_pages),
            dtype,
        )
        for index, start in enumerate(range(0, pages.num_pages, per_shard))
    ]


def _plan(
    request: TokenizeRequest,
    pages: NumberedPages,
    identity: TokenizerIdentity,
    jobs: list[ShardJob],
) -> dict[str, Any]:
    """Return what shards of one folder must have in common; files may have moved since."""
    described = _described(request)
    is_hub = isinstance(request.source, HubTextSource)
    names = ("column", *(("path", "subset", "split") if is_hub else ()))
    return {
        "source": pages.identity,
        **{name: described.get(name) for name in names},
        "tokenizer": identity.fingerprint,
        "number of shards": len(jobs),
        "size of shards": jobs[0].stop - jobs[0].start,
    }


def _write_missing(
    jobs: list[ShardJob], num_workers: int, report: Callable[[str], None]
) -> tuple[Shard, ...]:
    """Write the shards that are not there; return all of them in order."""
    done = {job.name: shard for job in jobs if (shard := finished(job)) is not None}
    if done:
        report(f"{len(done)} of {len(jobs)} shards are there already")
    waiting = [job for job in jobs if job.name not in done]
    began, num_new_bytes = time.perf_counter(), 0
    for timed in _run_jobs(waiting, num_workers):
        done[timed.shard.name] = timed.shard
        num_new_bytes += timed.shard.num_bytes
        report(_progress_line(timed, len(done), len(jobs), num_new_bytes, began))
    return tuple(done[job.name] for job in jobs)


def _run_jobs(jobs: list[ShardJob], num_workers: int) -> Iterator[ShardTime]:
    """Write shards, several at once in processes of their own; yields them as they finish."""
    workers = min(num_workers, len(jobs))
    if workers <= 1:
        yield from map(write_shard, jobs)
        return
    executor = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_start_worker)
    try:
        for future in as_completed([executor.submit(write_shard, job) for job in jobs]):
            yield future.result()
    except BrokenProcessPool as error:
        raise UserError(
            f"--workers {num_workers}: one of the processes was killed, perhaps for want of "
            "memory: run the command again, which keeps the shards that are finished, with fewer"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Use one core, since there are as many processes as asked for, and end with the parent."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # A killed parent lets go of the folder's lock: nobody must write into it any longer.
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _described(request: TokenizeRequest) -> dict[str, Any]:
    return request.source.model_dump(mode="json")


def _progress_line(
    timed: ShardTime, num_done: int, num_jobs: int, num_new_bytes: int, began: float
) -> str:
    rate = timed.shard.num_bytes / timed.seconds / 1e6
    overall = num_new_bytes / (time.perf_counter() - began) / 1e6
    return (
        f"{timed.shard.name} ({num_done}/{num_jobs}): {timed.shard.num_documents:,} documents, "
        f"{timed.shard.num_tokens:,} tokens, {rate:.2f} MB/s in its process, {overall:.2f} MB/s "
        "over all"
    )
