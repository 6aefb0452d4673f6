"""Folders that are complete or absent, whenever the process or the machine stops.

Owns the order of fsync and rename, and the lock that keeps a folder to one process. Does not know
what a folder holds. Read `trainer.checkpoint.folder` and `trainer.model.export`, which write their
folders through it.
"""

import contextlib
import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

PARTIAL = ".partial"
REPLACED = ".replaced"
LOCK = ".lock"


def beside(final: Path) -> Path:
    """Return the folder to write in until `publish` gives it the name `final`."""
    return final.with_name(final.name + PARTIAL)


def start_folder(final: Path) -> Path:
    """Create the empty folder beside `final`, dropping what an interrupted write left there."""
    partial = beside(final)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial


def publish(final: Path) -> None:
    """Make the folder beside `final` durable, then give it its name.

    A folder of that name is moved aside first and removed last: at every moment one of the two is
    there whole (see `restore_replaced`).
    """
    partial, replaced = beside(final), final.with_name(final.name + REPLACED)
    sync_tree(partial)
    if final.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        final.rename(replaced)
    partial.rename(final)
    sync_path(final.parent)
    sync_path(final.parent.parent)  # the parent itself may be new
    if replaced.exists():
        shutil.rmtree(replaced)


def restore_replaced(final: Path) -> bool:
    """Undo a replacement that was interrupted between its two renames; say whether it was."""
    replaced = final.with_name(final.name + REPLACED)
    if final.exists() or not replaced.exists():
        return False
    replaced.rename(final)
    sync_path(final.parent)
    return True


def sync_tree(folder: Path) -> None:
    """Flush every file and folder under `folder` to the disk."""
    for path in folder.rglob("*"):
        sync_path(path)
    sync_path(folder)


def sync_path(path: Path) -> None:
    """Flush one file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def tokenizer_errors() -> Iterator[None]:
    """Make an OSError of what the tokenizers library raises where it cannot write: an Exception."""
    try:
        yield
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise OSError(errno.EIO, f"tokenizer: {error}") from error


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Make a folder and keep it to this process; the system lets go of it if the process dies.

    At the end the lock goes, and a folder made here too if nothing else came into it.

    Raises:
        BlockingIOError: another process holds it.
        OSError: it cannot be made, or nothing can be written there.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _locked(folder / LOCK):
            yield
    finally:
        if is_new:
            with contextlib.suppress(OSError):
                folder.rmdir()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock a file made for it, which goes at the end."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError as error:  # such as a network file system without locks
            logger.warning("%s cannot be locked (%s): start no other run there", path.parent, error)
        if not _is_at(path, os.fstat(lock.fileno())):
            raise BlockingIOError("its lock has just been removed by the process that held it")
        try:
            yield
        finally:
            # What ends the block matters more than a lock that stays.
            with contextlib.suppress(OSError):
                path.unlink()


def _is_at(path: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(status, path.stat())
    except FileNotFoundError:
        return False
