"""The folder that `trainer tokenize` writes into: begun by one command, and by one at a time.

Owns the plan (`plan.json`), which says what the shards were begun with. The lock is
`trainer.durable.hold`; `writer.py` fills the folder.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from trainer.data.shards.manifest import write_json
from trainer.durable import LOCK, hold, tokenizer_errors
from trainer.errors import UserError

PLAN = "plan.json"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder and hold it while shards are written; the system lets go of it if we die.

    Raises:
        UserError: another process writes into it, or it cannot be made.
    """
    with contextlib.ExitStack() as stack:
        with writing(folder):
            try:
                stack.enter_context(hold(folder))
            except BlockingIOError as error:
                raise UserError(
                    f"DST={str(folder)!r} is being written by another 'trainer tokenize': wait for "
                    "it, or give another folder"
                ) from error
        yield


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Make an error of the user's of what keeps files from being written, such as a full disk."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"DST={str(folder)!r} cannot be written ({error.strerror or error}): make room for it "
            "and run the command again, which keeps the shards that are finished, or give another "
            "folder"
        ) from error


def begin(folder: Path, plan: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the plan and the tokenizer, or check that the folder's plan is this one.

    The plan is written first and the tokenizer until it is whole, so that a folder can be gone on
    with, wherever its first command was stopped.

    Raises:
        UserError: the folder cannot be written, holds something else, or shards of another plan.
    """
    path = folder / PLAN
    if path.exists():
        _compare(folder, _read_plan(path), plan)
    elif any(entry.name not in (LOCK, f"{PLAN}.partial") for entry in folder.iterdir()):
        raise UserError(
            f"DST={str(folder)!r} is not empty and holds no token shards: give a new or empty "
            "folder"
        )
    else:
        with writing(folder):
            write_json(path, plan)
    if not (folder / "tokenizer").exists():
        with writing(folder):
            partial = folder / "tokenizer.partial"
            with tokenizer_errors():
                tokenizer.save_pretrained(partial)
            partial.rename(folder / "tokenizer")


def _read_plan(path: Path) -> dict[str, Any]:
    try:
        plan = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(
            f"DST={str(path.parent)!r}: {path} is damaged ({error}): give another folder, or empty "
            "this one"
        ) from error
    return plan if isinstance(plan, dict) else {}


def _compare(folder: Path, found: dict[str, Any], plan: dict[str, Any]) -> None:
    for name, value in plan.items():
        if found.get(name) != value:
            raise UserError(
                f"DST={str(folder)!r} was begun with another {name} ({found.get(name)}, now "
                f"{value}): give another folder, or empty this one"
            )
