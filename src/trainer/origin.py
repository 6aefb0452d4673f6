"""What `model.name` points at: weights in Hugging Face layout, or a checkpoint of a run.

Owns telling the two apart, and what to say of a folder that is neither and was meant to be one.
Hub names and the reading of either are `trainer.model`'s and `trainer.checkpoint`'s.
"""

import os
from pathlib import Path

from trainer.errors import UserError
from trainer.saved_steps import CHECKPOINTS, HF_FOLDER, INDEX, WEIGHTS, is_complete, step_of

CONFIG = "config.json"


def find_checkpoint(name: str, field: str = "model.name") -> Path | None:
    """Return the checkpoint that a name points at; None for anything else.

    Args:
        name: A folder `checkpoints/step_N` of a run, a folder in Hugging Face layout, a hub name.
        field: What `name` is called where the user gives it.

    Raises:
        UserError: it is a run's folder or one of its folders of steps, a step that is not there,
            a checkpoint that was never finished, or a place that this user may not see.
    """
    folder = Path(os.path.expanduser(name))
    try:
        if is_complete(folder):
            return folder
        problem = _problem(folder)
    except OSError as error:
        raise UserError(
            f"{field}={name!r} cannot be looked at ({error.strerror}): make it readable, or give "
            "another"
        ) from error
    if problem:
        raise UserError(f"{field}={name!r} {problem}")
    return None


def companions(name: str, field: str = "model.name") -> str:
    """Return where `config.json` and the tokenizer of a name lie: in a checkpoint's `hf` folder.

    Raises:
        UserError: as `find_checkpoint`.
    """
    checkpoint = find_checkpoint(name, field)
    return name if checkpoint is None else str(checkpoint / HF_FOLDER)


def _problem(folder: Path) -> str | None:
    """Say what keeps a folder from being a start, and what to type; None if nothing of a run's."""
    if folder.name == HF_FOLDER and is_complete(folder.parent):
        return f"is the config of a checkpoint, without weights: give {str(folder.parent)!r}"
    if (folder / CONFIG).is_file():
        return None
    if (folder / CHECKPOINTS).is_dir():
        return f"is the folder of a run: give {_one_of(_steps_of(folder))}"
    if steps := _steps_in(folder):
        return f"holds several steps of a run: give {_one_of(steps)}"
    siblings = _steps_in(folder.parent)
    is_step = step_of(Path(folder.name.partition(".")[0])) is not None
    if (folder / INDEX).exists() or (folder.is_dir() and is_step):
        return f"is no complete checkpoint (unfinished, or files gone): give {_one_of(siblings)}"
    if siblings and not folder.exists():
        return f"is not there: give {_one_of(siblings)}"
    return None


def _steps_of(run: Path) -> list[Path]:
    return _steps_in(run / CHECKPOINTS) or _steps_in(run / WEIGHTS)


def _steps_in(folder: Path) -> list[Path]:
    """Return the checkpoints and weights in a folder of steps, ascending by number."""
    if not folder.is_dir():
        return []
    steps = [(step, path) for path in folder.iterdir() if (step := step_of(path)) is not None]
    return [path for _, path in sorted(steps) if is_complete(path) or (path / CONFIG).is_file()]


def _one_of(steps: list[Path]) -> str:
    """Return the steps to choose from, the latest in full."""
    if not steps:
        return "another one, since no step of that run was saved whole"
    others = ", ".join(path.name for path in steps[:-1])
    return f"{str(steps[-1])!r}" + (f" (or {others})" if others else "")
