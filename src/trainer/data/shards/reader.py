"""Token shards as pages: documents in any order, straight from memory-mapped files.

Owns the checks before step 1 and the way from a document's number to its ids. Every document of
every shard takes part in one shuffle. In memory lie some hundred bytes a shard and at most
`OPEN_SHARDS` maps; pages of the files are the operating system's cache.
"""

import bisect
import functools
import hashlib
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.shards.manifest import (
    ENDS_DTYPE,
    Manifest,
    Shard,
    checksum,
    ends_path,
    tokens_path,
)
from trainer.data.text.encode import TokenizerIdentity
from trainer.data.text.pages import Cursor, Page, Shuffle
from trainer.errors import UserError

PAGE_DOCUMENTS = 1024
OPEN_SHARDS = 128


class TokenPages:
    """The documents of a folder of token shards.

    Args:
        folder: of the shards.
        manifest: of the folder, checked (`check_shards`).
        shuffle: order of documents.
    """

    def __init__(self, folder: Path, manifest: Manifest, shuffle: Shuffle) -> None:
        self._folder = folder
        self._manifest = manifest
        self._shuffle = shuffle
        self._ends = list(accumulate(shard.num_documents for shard in manifest.shards))
        self._maps = functools.lru_cache(OPEN_SHARDS)(self._open)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def identity(self) -> dict[str, Any]:
        """The number of documents and what the shards' checksums amount to."""
        checksums = "\n".join(s.tokens_checksum + s.ends_checksum for s in self._manifest.shards)
        digest = hashlib.blake2b(checksums.encode(), digest_size=16).hexdigest()
        return {"documents": len(self), "checksum of the shards": digest}

    def page(self, epoch: int, cursor: Cursor) -> Page:
        """Return the documents of a page, each read when it is asked for."""
        start = cursor[0] * PAGE_DOCUMENTS
        stop = min(start + PAGE_DOCUMENTS, len(self))
        following = (cursor[0] + 1,) if stop < len(self) else None
        return Page(_TokenDocuments(self, epoch, range(start, stop)), following)

    def fraction(self, cursor: Cursor) -> float:
        """Return the part of the documents before a cursor."""
        return min(1.0, cursor[0] * PAGE_DOCUMENTS / len(self))

    def document(self, epoch: int, index: int) -> np.ndarray:
        """Return the ids of the document that comes at `index` in an epoch, as they lie on disk.

        Raises:
            UserError: its shard is gone or damaged.
        """
        number = self._shuffle.place(index, len(self), epoch)
        shard = bisect.bisect_right(self._ends, number)
        number -= self._ends[shard - 1] if shard else 0
        tokens, ends = self._maps(shard)
        start, stop = ends[number - 1] if number else 0, ends[number]
        is_inside = 0 <= start < stop <= len(tokens)
        if not is_inside or tokens[start:stop].max() >= self._manifest.tokenizer.num_ids:
            name = self._manifest.shards[shard].name
            raise UserError(
                f"shard {tokens_path(self._folder, name)} or its ends file is "
                f"damaged (document {number + 1}): copy both again, or remove them and run "
                "'trainer tokenize' again; verify = true finds all such shards before step 1"
            )
        return tokens[start:stop]

    def _open(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        name = self._manifest.shards[shard].name
        try:
            return (
                np.memmap(tokens_path(self._folder, name), self._manifest.dtype, mode="r"),
                np.memmap(ends_path(self._folder, name), ENDS_DTYPE, mode="r"),
            )
        except (OSError, ValueError) as error:
            raise UserError(
                f"shard {tokens_path(self._folder, name)} or its ends file cannot be "
                f"read ({error}): restore them"
            ) from error


@dataclass(frozen=True, eq=False)
class _TokenDocuments:
    """The documents of a page, looked up one by one."""

    pages: TokenPages
    epoch: int
    indices: range

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.pages.document(self.epoch, self.indices[index])


def check_shards(
    folder: Path,
    manifest: Manifest,
    field: str,
    identity: TokenizerIdentity,
    *,
    verify: bool = False,
) -> None:
    """Refuse shards that a run would stumble over later.

    Args:
        folder: of the shards.
        manifest: of the folder.
        field: the source's name in the config, for messages.
        identity: of the run's tokenizer.
        verify: also compare checksums, which reads every byte.

    Raises:
        UserError: a shard is missing, of the wrong size or damaged, or the ids are of another
            tokenizer; names the file.
    """
    made_by = manifest.tokenizer
    if made_by.fingerprint != identity.fingerprint:
        raise UserError(
            f"{field}.path={str(folder)!r}: its ids are of the tokenizer {made_by.name!r} "
            f"({made_by.num_ids} ids, fingerprint {made_by.fingerprint}), the run's is "
            f"{identity.name!r} ({identity.num_ids} ids, fingerprint {identity.fingerprint}): set "
            f"data.tokenizer = {str(folder / 'tokenizer')!r}, or tokenize the text again"
        )
    if not sum(shard.num_documents for shard in manifest.shards):
        raise UserError(f"{field}.path={str(folder)!r} has no documents: tokenize some text")
    for shard in manifest.shards:
        _check_shard(folder, shard, np.dtype(manifest.dtype).itemsize, field, verify)


def _check_shard(folder: Path, shard: Shard, token_bytes: int, field: str, verify: bool) -> None:
    ends_bytes = np.dtype(ENDS_DTYPE).itemsize
    for path, expected, digest in (
        (tokens_path(folder, shard.name), shard.num_tokens * token_bytes, shard.tokens_checksum),
        (ends_path(folder, shard.name), shard.num_documents * ends_bytes, shard.ends_checksum),
    ):
        try:
            found = path.stat().st_size
            is_intact = found != expected or not verify or checksum(path) == digest
        except OSError as error:
            raise UserError(
                f"{field}: shard {path} is missing or cannot be read ({error.strerror}): copy it "
                "again, or run 'trainer tokenize' again (it makes what is missing)"
            ) from error
        if found != expected:
            raise UserError(
                f"{field}: shard {path} has {found} bytes and should have {expected}: it is "
                "truncated or another file; copy it again, or remove it and run 'trainer tokenize' "
                "again"
            )
        if not is_intact:
            raise UserError(
                f"{field}: shard {path} does not have the checksum of its manifest: it is damaged; "
                "copy it again, or remove it and run 'trainer tokenize' again"
            )
