"""Whether what a step is made of fits the host: a number with zeros too many is told, not tried.

Owns the bound, which is far below what is really held: what it refuses cannot run here.
"""

import os

from trainer.config.data import BatchConfig
from trainer.errors import UserError

GIB = 2**30
BYTES_OF_A_TOKEN = 8 + 8 + 4
"""Of a document: its id, its target, its weight."""


def check_fits_host(field: str, count: int, bytes_each: int, what: str) -> None:
    """Check that a machine's memory holds what every rank holds of a step.

    Args:
        field: What the user set, as typed.
        count: Its value.
        bytes_each: Bytes of one.
        what: What it counts, for the message.

    Raises:
        UserError: it does not fit.
    """
    needed, available = count * bytes_each, host_bytes()
    if needed > available:
        raise UserError(
            f"{field}={count}: a step's {what} take {needed / GIB:,.0f} GiB or more of each rank's "
            f"host, which has {available / GIB:,.0f} GiB; stay well below {available // bytes_each}"
        )


def check_packs(data: BatchConfig) -> None:
    """Check that the packs of a step fit.

    Raises:
        UserError: they do not.
    """
    check_fits_host("data.seq_len", data.seq_len, BYTES_OF_A_TOKEN, "tokens of a pack")
    what = f"packs of {data.seq_len} tokens"
    check_fits_host("data.batch_size", data.batch_size, data.seq_len * BYTES_OF_A_TOKEN, what)


def host_bytes() -> int:
    """Return this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
