"""A folder that the process may not look into, for tests that may run as root."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


@contextmanager
def unseen(folder: Path) -> Iterator[None]:
    """Make a folder whose entries this process may not see; root becomes another user for it."""
    folder.mkdir()
    folder.chmod(0)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o700)
