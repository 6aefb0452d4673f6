"""Which files of a folder are data: one rule for rows and for text.

Reads no file. `sources.py` and `text/sources.py` use it.
"""

import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from trainer.errors import UserError


def existing(path: str, given: str) -> Path:
    """Return a source's file or folder.

    Args:
        path: from the config.
        given: the setting and its value, for messages.

    Raises:
        UserError: it is not there, or the system does not let this user look.
    """
    try:
        is_there = Path(path).exists()
    except OSError as error:
        raise UserError(
            f"{given} cannot be looked at ({error.strerror}): make it readable, or give another"
        ) from error
    if not is_there:
        raise UserError(f"{given} does not exist: give a file or folder")
    return Path(path)


def files_under(
    folder: Path, suffixes: Collection[str], field: str, passed_over: Collection[str] = ()
) -> list[Path]:
    """Return the files below a folder that are data, in the same order on every machine.

    A folder's files come before what lies deeper, each by name. Links are followed, and a folder is
    entered once. Hidden files and folders belong to editors and systems, and are passed over.

    Args:
        folder: to look through.
        suffixes: of the files, in any case of letters.
        field: the source's name in the config, for messages.
        passed_over: names of folders that are not entered.

    Raises:
        UserError: a folder cannot be read, a link is broken, or one of the names is that of no
            regular file.
    """
    endings = tuple(suffix.lower() for suffix in suffixes)
    found: list[Path] = []
    for entry in _walk(folder, frozenset(passed_over), set(), field):
        is_data = entry.name.lower().endswith(endings)
        # A broken link may have led to a folder of data, whatever its name.
        if is_data or (entry.is_symlink() and not os.path.exists(entry.path)):
            if not _is(entry.is_file):
                raise UserError(
                    f"{field}: {entry.path} cannot be read (it is a broken link, a pipe or a "
                    "device): restore the file, or move it away"
                )
            found.append(Path(entry.path))
    return found


def _walk(
    folder: Path, passed_over: frozenset[str], seen: set[tuple[int, int]], field: str
) -> Iterator[os.DirEntry[str]]:
    """Yield what is not a folder, depth first."""
    try:
        status = os.stat(folder)
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(
            f"{field}: {folder} cannot be read ({error.strerror}): make it readable, or move it "
            "away"
        ) from error
    if (status.st_dev, status.st_ino) in seen:
        return
    seen.add((status.st_dev, status.st_ino))
    visible = [entry for entry in entries if not entry.name.startswith(".")]
    folders = [entry for entry in visible if _is(entry.is_dir)]
    yield from (entry for entry in visible if not _is(entry.is_dir))
    for entry in folders:
        if entry.name not in passed_over:
            yield from _walk(Path(entry.path), passed_over, seen, field)


def _is(kind: Callable[[], bool]) -> bool:
    """Return whether an entry is of a kind; a link to itself, which the system refuses, is not."""
    try:
        return kind()
    except OSError:
        return False
