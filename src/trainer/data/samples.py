"""What tells data from other data of the same size: hashes of a few rows or documents.

Owns the choice of what is hashed and what a difference means. Ranks must have equal samples; a
resumed run may have mended a few rows, so it is refused only where most differ.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.errors import UserError

logger = logging.getLogger(__name__)

NUM_SAMPLED = 64
"""Of a source, evenly spread."""


def sample(size: int, digest_of: Callable[[int], bytes]) -> list[str]:
    """Return hashes of up to `NUM_SAMPLED` of `size` items, 8 digits each."""
    num_sampled = min(size, NUM_SAMPLED)
    places = [place * size // num_sampled for place in range(num_sampled)]
    return [digest_of(place)[:4].hex() for place in places]


def row_digest(row: Mapping[str, Any]) -> bytes:
    """Return a hash of a row; of values that JSON lacks only their type tells."""
    text = json.dumps(list(row.items()), default=lambda value: type(value).__name__)
    return hashlib.blake2b(text.encode()).digest()


def check_samples(
    ours: Sequence[Sequence[str]], saved: Sequence[Sequence[str]], field: str
) -> None:
    """Refuse a position in data most of which are others by now; of a few, warn.

    Args:
        ours: of each source, what `sample` returned; empty where it could not be read.
        saved: the same of the run that saved the position.
        field: of the sources in the config.

    Raises:
        UserError: in a source more than half of the sample differs.
    """
    for place, (now, before) in enumerate(zip(ours, saved, strict=True)):
        if not now or len(now) != len(before):
            continue
        num_others = sum(a != b for a, b in zip(now, before, strict=True))
        name = field if len(ours) == 1 else f"{field}.sources[{place}]"
        if 2 * num_others > len(now):
            raise UserError(
                f"{name}: {num_others} of {len(now)} rows or documents looked at are others than "
                "those of the run that saved the checkpoint, so its place in the data means "
                "nothing here: restore the data, or start a new run from the checkpoint's weights"
            )
        if num_others:
            logger.warning(
                "%s: %d of %d rows or documents looked at have changed since the checkpoint",
                name, num_others, len(now),
            )  # fmt: skip
