"""One token shard: which pages become it, and its files, each whole or not there.

Owns the order of writes: the tokens and ends files, then the shard's own record. `writer.py` makes
the jobs and runs them.
"""

import functools
import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from trainer.config.pretrain import HubTextSource, StdlibSource, TextFilesSource
from trainer.data.shards.folder import writing
from trainer.data.shards.manifest import ENDS_DTYPE, Shard, ends_path, tokens_path, write_json
from trainer.data.text.encode import TextEncoder
from trainer.data.text.pages import Cursor, Documents, NumberedPages
from trainer.data.text.sources import open_numbered
from trainer.data.tokenizer import choose_tokenizer

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
    dtype: Literal["<u2", "<u4"]


@dataclass(frozen=True)
class ShardTime:
    """A finished shard and the seconds it took one process."""

    shard: Shard
    seconds: float


@functools.lru_cache(maxsize=1)
def opened(request: TokenizeRequest) -> tuple[NumberedPages, TextEncoder]:
    """Open a request's source and tokenizer; once a process, however many shards it writes."""
    tokenizer = choose_tokenizer(request.tokenizer, None, field="--tokenizer")
    return open_numbered(request.source), TextEncoder(tokenizer)


def write_shard(job: ShardJob) -> ShardTime:
    """Tokenize a job's pages and write its files, then its record.

    Raises:
        UserError: a page cannot be read, or the files cannot be written.
    """
    began = time.perf_counter()
    pages, encoder = opened(job.request)
    with writing(job.request.folder):
        shard = _write_files(job, _documents(pages, job), encoder)
    return ShardTime(shard, time.perf_counter() - began)


def _write_files(job: ShardJob, texts: Iterator[list[str]], encoder: TextEncoder) -> Shard:
    folder = job.request.folder
    paths = tokens_path(folder, job.name), ends_path(folder, job.name)
    partials = [path.with_name(path.name + ".partial") for path in paths]
    with partials[0].open("wb") as tokens_file, partials[1].open("wb") as ends_file:
        tokens = _HashedFile(tokens_file, job.dtype)
        ends = _HashedFile(ends_file, ENDS_DTYPE)
        num_bytes = _write_documents(texts, encoder, tokens, ends)
    for partial, path in zip(partials, paths, strict=True):
        partial.replace(path)
    shard = Shard(job.name, ends.count, tokens.count, num_bytes, tokens.checksum, ends.checksum)
    write_json(_record_path(job), asdict(shard))
    return shard


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


def finished(job: ShardJob) -> Shard | None:
    """Return the record of a job's shard if it is whole and the files are of the right size."""
    folder = job.request.folder
    try:
        shard = Shard(**json.loads(_record_path(job).read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    sizes = {
        tokens_path(folder, job.name): shard.num_tokens * np.dtype(job.dtype).itemsize,
        ends_path(folder, job.name): shard.num_documents * np.dtype(ENDS_DTYPE).itemsize,
    }
    whole = all(path.exists() and path.stat().st_size == size for path, size in sizes.items())
    return shard if whole else None


def _record_path(job: ShardJob) -> Path:
    return job.request.folder / f"{job.name}.json"
