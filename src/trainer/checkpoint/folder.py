"""The folder of checkpoints: leftovers, and what is kept.

Owns `checkpoints/step_N` as files; never opens a tensor. A folder counts as a checkpoint when it
has its final name and its manifest (`trainer.saved_steps`); anything else is a leftover of an
interrupted write, named in the log and never taken for one. Read `store.py` next.
"""

import logging
import re
import shutil
from pathlib import Path

from trainer.durable import PARTIAL, REPLACED, restore_replaced, sync_path
from trainer.saved_steps import ABANDONED, list_steps, step_folder

logger = logging.getLogger(__name__)

DELETED = ".deleted"
_LEFTOVER = re.compile(r"step_\d+(" + "|".join(map(re.escape, (PARTIAL, REPLACED, DELETED))) + ")")


def list_leftovers(root: Path) -> list[Path]:
    """Return what lies among the checkpoints and is none."""
    if not root.is_dir():
        return []
    complete = {step_folder(root, step) for step in list_steps(root)}
    paths = (path for path in root.iterdir() if ABANDONED not in path.name)
    return sorted(path for path in paths if path not in complete)


def recover(root: Path) -> None:
    """Restore a checkpoint whose replacement was interrupted; name every leftover in the log."""
    for path in list_leftovers(root):
        if path.name.endswith(REPLACED) and restore_replaced(path.with_suffix("")):
            logger.warning("restored %s, whose replacement was interrupted", path.with_suffix(""))
    for path in list_leftovers(root):
        logger.warning(
            "%s is a leftover of an interrupted write, not a checkpoint: ignored%s",
            path,
            ", removed after the next save" if _is_ours(path) else "",
        )


def free_mib(root: Path) -> float:
    """Return the free space where the checkpoints lie, or will."""
    existing = next(path for path in (root, *root.parents) if path.exists())
    return shutil.disk_usage(existing).free / 2**20


def prune(root: Path, newest: int, keep_last: int | None, keep_every: int | None) -> None:
    """Delete what need not be kept, and the leftovers of interrupted writes.

    Call it once the checkpoint of `newest` is durable. Newer ones, of a branch that was resumed
    from an older step, are left alone.

    Args:
        root: The folder of checkpoints.
        newest: The step just saved.
        keep_last: How many of the steps up to `newest` to keep; None: all.
        keep_every: Steps divisible by this are kept besides; None: none.
    """
    for path in list_leftovers(root):
        if _is_ours(path):
            shutil.rmtree(path)
    for step in expendable(list_steps(root), newest, keep_last, keep_every):
        _delete(step_folder(root, step))


def expendable(
    steps: list[int], newest: int, keep_last: int | None, keep_every: int | None
) -> list[int]:
    """Return the steps that `prune` would delete."""
    if keep_last is None:
        return []
    older = [step for step in steps if step <= newest][:-keep_last]
    return [step for step in older if keep_every is None or step % keep_every]


def _delete(folder: Path) -> None:
    # Renamed first: a removal that is interrupted must not leave half under the final name.
    doomed = folder.with_name(folder.name + DELETED)
    folder.rename(doomed)
    sync_path(folder.parent)
    shutil.rmtree(doomed)


def _is_ours(path: Path) -> bool:
    return path.is_dir() and _LEFTOVER.fullmatch(path.name) is not None
