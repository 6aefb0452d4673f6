"""Writes token shards: in parallel, and from where an interrupted run stopped.

Owns the division of a source into shards, which follows from its sizes alone, and the order of
writes: a shard's files, then its own record, last the manifest. Each appears whole or not at all,
so whatever stops the run, the next one makes only what is missing.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from transformers import PreTrainedTokenizerFast

from trainer.config.pretrain import HubTextSource, StdlibSource, TextFilesSource
from trainer.data.shards.manifest import (
    ENDS_DTYPE,
    MANIFEST,
    Manifest,
    Shard,
    ends_path,
    tokens_path,
    write_json,
)
from trainer.data.text.encode import TextEncoder, TokenizerIdentity, identify
from trainer.data.text.pages import Cursor, Documents, NumberedPages
from trainer.data.text.sources import open_numbered
from trainer.data.tokenizer import choose_tokenizer
from trainer.errors import UserError

PLAN = "plan.json"
BATCH_DOCUMENTS = 64


@dataclass(frozen=True)
class TokenizeRequest:
    """What `trainer tokenize` was asked.

    Args:
        source: of text; not streamed.
        folder: to write into.
        tokenizer: folder or hub name; None: the built-in byte-level tokenizer.
        num_workers: processes.
        shard_bytes: of text in a shard, about.
    """

    source: TextFilesSource | StdlibSource | HubTextSource
    folder: Path
    tokenizer: str | None
    num_workers: int
    shard_bytes: int


@dataclass(frozen=True)
class ShardJob:
    """Pages `start:stop` of the source, which become one shard."""

    request: TokenizeRequest
    name: str
    start: int
    stop: int
    dtype: str


@dataclass(frozen=True)
class ShardTime:
    """A finished shard and the seconds it took one process."""

    shard: Shard
    seconds: float


def tokenize(request: TokenizeRequest, report: Callable[[str], None] = print) -> Manifest:
    """Tokenize a source into a folder of shards; a folder that is complete stays as it is.

    Args:
        request: what to do.
        report: takes a line for each finished shard.

    Returns:
        The folder's manifest.

    Raises:
        UserError: the source or tokenizer cannot be read, or the folder holds shards of another
            source, tokenizer or size of shards.
    """
    tokenizer = choose_tokenizer(request.tokenizer, None, field="--tokenizer")
    identity = identify(tokenizer)
    jobs = _plan_jobs(request, identity)
    _prepare_folder(request, identity, tokenizer, jobs)
    done = {job.name: shard for job in jobs if (shard := _finished(job)) is not None}
    if done:
        report(f"{len(done)} of {len(jobs)} shards are there already")
    waiting = [job for job in jobs if job.name not in done]
    began, num_new_bytes = time.perf_counter(), 0
    for timed in _run_jobs(waiting, request.num_workers):
        done[timed.shard.name] = timed.shard
        num_new_bytes += timed.shard.num_bytes
        report(_progress_line(timed, len(done), len(jobs), num_new_bytes, began))
    manifest = Manifest(
        jobs[0].dtype, identity, _described(request), tuple(done[job.name] for job in jobs)
    )
    write_json(request.folder / MANIFEST, manifest.to_json())
    return manifest


def _plan_jobs(request: TokenizeRequest, identity: TokenizerIdentity) -> list[ShardJob]:
    pages = open_numbered(request.source, "SRC")
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


def _prepare_folder(
    request: TokenizeRequest,
    identity: TokenizerIdentity,
    tokenizer: PreTrainedTokenizerFast,
    jobs: list[ShardJob],
) -> None:
    """Write the plan and the tokenizer, or check that the folder's plan is this one."""
    plan = {
        "source": open_numbered(request.source, "SRC").identity,
        "column": _described(request).get("column"),
        "tokenizer": identity.fingerprint,
        "number of shards": len(jobs),
    }
    path = request.folder / PLAN
    if path.exists():
        found = json.loads(path.read_text())
        for name, value in plan.items():
            if found.get(name) != value:
                raise UserError(
                    f"DST={str(request.folder)!r} was begun with another {name} "
                    f"({found.get(name)}, now {value}): give another folder, or empty this one"
                )
        return
    request.folder.mkdir(parents=True, exist_ok=True)
    if any(request.folder.iterdir()):
        raise UserError(
            f"DST={str(request.folder)!r} is not empty and holds no token shards: give a new or "
            "empty folder"
        )
    tokenizer.save_pretrained(request.folder / "tokenizer")
    write_json(path, plan)


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
    finally:
        executor.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Let each process use one core: there are as many processes as asked for."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def write_shard(job: ShardJob) -> ShardTime:
    """Tokenize a job's pages and write its files, then its record.

    Raises:
        UserError: a page cannot be read.
    """
    began = time.perf_counter()
    folder = job.request.folder
    pages = open_numbered(job.request.source, "SRC")
    encoder = TextEncoder(choose_tokenizer(job.request.tokenizer, None, field="--tokenizer"))
    paths = tokens_path(folder, job.name), ends_path(folder, job.name)
    partials = [path.with_name(path.name + ".partial") for path in paths]
    with partials[0].open("wb") as tokens_file, partials[1].open("wb") as ends_file:
        tokens = _HashedFile(tokens_file, job.dtype)
        ends = _HashedFile(ends_file, ENDS_DTYPE)
        num_bytes = _write_documents(_documents(pages, job), encoder, tokens, ends)
    for partial, path in zip(partials, paths, strict=True):
        partial.replace(path)
    shard = Shard(job.name, ends.count, tokens.count, num_bytes, tokens.checksum, ends.checksum)
    write_json(_record_path(job), asdict(shard))
    return ShardTime(shard, time.perf_counter() - began)


class _HashedFile:
    """Numbers written to a file, counted and hashed on the way."""

    def __init__(self, file: BinaryIO, dtype: str) -> None:
        self._file = file
        self._dtype = dtype
        self._hash = hashlib.blake2b(digest_size=16)
        self.count = 0

    @property
    def checksum(self) -> str:
        """Of what was written."""
        return self._hash.hexdigest()

    def write(self, numbers: np.ndarray) -> None:
        """Append numbers."""
        content = numbers.astype(self._dtype).tobytes()
        self._file.write(content)
        self._hash.update(content)
        self.count += len(numbers)

    def sync(self) -> None:
        """Flush to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())


def _write_documents(
    texts: Iterator[list[str]], encoder: TextEncoder, tokens: _HashedFile, ends: _HashedFile
) -> int:
    """Write the documents that are long enough to train on; return their bytes of text."""
    num_bytes = 0
    for batch in texts:
        encoded = zip(batch, encoder.encode_batch(batch), strict=True)
        kept = [(text, ids) for text, ids in encoded if len(ids) > 1]
        if kept:
            num_bytes += sum(len(text.encode()) for text, _ in kept)
            ends.write(tokens.count + np.cumsum([len(ids) for _, ids in kept]))
            tokens.write(np.concatenate([ids for _, ids in kept]))
    tokens.sync()
    ends.sync()
    return num_bytes


def _documents(pages: NumberedPages, job: ShardJob) -> Iterator[list[str]]:
    for number in range(job.start, job.stop):
        cursor: Cursor | None = (number,)
        while cursor is not None and cursor[0] == number:
            page = pages.page(0, cursor)
            yield from _batches(page.documents)
            cursor = page.following


def _batches(documents: Documents) -> Iterator[list[str]]:
    for start in range(0, len(documents), BATCH_DOCUMENTS):
        stop = min(start + BATCH_DOCUMENTS, len(documents))
        yield [str(documents[index]) for index in range(start, stop)]


def _finished(job: ShardJob) -> Shard | None:
    """Return the record of a job's shard if record and files are there, of the right size."""
    folder = job.request.folder
    if not _record_path(job).exists():
        return None
    shard = Shard(**json.loads(_record_path(job).read_text()))
    sizes = {
        tokens_path(folder, job.name): shard.num_tokens * np.dtype(job.dtype).itemsize,
        ends_path(folder, job.name): shard.num_documents * np.dtype(ENDS_DTYPE).itemsize,
    }
    whole = all(path.exists() and path.stat().st_size == size for path, size in sizes.items())
    return shard if whole else None


def _record_path(job: ShardJob) -> Path:
    return job.request.folder / f"{job.name}.json"


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
