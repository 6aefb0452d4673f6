"""What a folder of token shards says of itself: `manifest.json`.

Owns the format. `reader.py` checks the shards against it, `writer.py` writes it last, so that a
folder without one is known to be incomplete.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeInt, TypeAdapter, ValidationError

from trainer.data.text.encode import TokenizerIdentity
from trainer.errors import UserError

MANIFEST = "manifest.json"
FORMAT = "trainer token shards 1"
ENDS_DTYPE = "<i8"
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class Shard:
    """One shard: `NAME.tokens`, ids one after another, and `NAME.ends`, where each document ends.

    Args:
        name: without suffix.
        num_documents: entries of the ends file, int64 little-endian.
        num_tokens: entries of the tokens file.
        num_bytes: UTF-8 bytes of the text that was tokenized.
        tokens_checksum: BLAKE2b-128 of the tokens file.
        ends_checksum: of the ends file.
    """

    name: str
    num_documents: NonNegativeInt
    num_tokens: NonNegativeInt
    num_bytes: NonNegativeInt
    tokens_checksum: str
    ends_checksum: str


@dataclass(frozen=True)
class Manifest:
    """A folder of token shards.

    Args:
        dtype: of the tokens files, `<u2` or `<u4`.
        tokenizer: that made the ids.
        source: what was tokenized, as `trainer tokenize` was asked.
        shards: in order.
    """

    dtype: Literal["<u2", "<u4"]
    tokenizer: TokenizerIdentity
    source: dict[str, Any]
    shards: tuple[Shard, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON, with totals for people."""
        totals = {
            "num_documents": sum(shard.num_documents for shard in self.shards),
            "num_tokens": sum(shard.num_tokens for shard in self.shards),
            "num_bytes": sum(shard.num_bytes for shard in self.shards),
        }
        return {"format": FORMAT, **totals, **asdict(self)}

    @classmethod
    def from_json(cls, text: bytes) -> "Manifest":
        """Return what `to_json` was called on; ValueError on other JSON."""
        return TypeAdapter(cls).validate_json(text, strict=True)


def tokens_path(folder: Path, name: str) -> Path:
    """Return the file of a shard's ids."""
    return folder / f"{name}.tokens"


def ends_path(folder: Path, name: str) -> Path:
    """Return the file of the ends of a shard's documents."""
    return folder / f"{name}.ends"


def read_manifest(folder: Path, field: str) -> Manifest:
    """Read a folder's manifest.

    Args:
        folder: of the shards.
        field: its source's name in the config, for messages.

    Raises:
        UserError: there is none, or it is not one of this format.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
        value = json.loads(text)
        if value["format"] == FORMAT:
            return Manifest.from_json(text)
    except OSError as error:
        raise UserError(
            f"{field}.path={str(folder)!r}: {path} cannot be read ({error.strerror}): give a "
            "folder that 'trainer tokenize SRC DST' has finished; run it again to resume"
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{field}.path={str(folder)!r}: {path} is damaged ({_fault(error)}): restore it, or "
            "tokenize the text again"
        ) from error
    raise UserError(
        f"{field}.path={str(folder)!r}: {path} has format {value['format']!r}, this version reads "
        f"{FORMAT!r}: tokenize the text again"
    )


def _fault(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return repr(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that the file is whole or absent, whenever the machine stops."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def checksum(path: Path) -> str:
    """Return the BLAKE2b-128 of a file."""
    hashed = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            hashed.update(chunk)
    return hashed.hexdigest()
