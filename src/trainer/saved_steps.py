"""Names of what a run saves: steps, and when a folder is a whole checkpoint.

Owns names alone, so that whoever is given a folder can tell what it is without opening a tensor:
`trainer.checkpoint` (which writes and reads them), and `trainer.origin`, read next.
"""

import re
from pathlib import Path

CHECKPOINTS, WEIGHTS = "checkpoints", "weights"
"""In a run's folder: the whole state by step, and Hugging Face weights by step."""
MANIFEST, INDEX = "manifest.json", ".metadata"
"""In a checkpoint: its JSON part, which is written last, and DCP's index of its tensors."""
HF_FOLDER = "hf"
"""In a checkpoint: `config.json` and tokenizer."""
ABANDONED = ".abandoned"
"""Behind the name of a step that a resume from an earlier one has left."""

_STEP = re.compile(r"step_(0|[1-9]\d*)")


def step_folder(root: Path, step: int) -> Path:
    """Return where what is saved of `step` lies once it is complete."""
    return root / f"step_{step}"


def step_of(folder: Path) -> int | None:
    """Return the step whose name a folder has; None for any other name."""
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match else None


def list_steps(root: Path) -> list[int]:
    """Return the steps that have a complete checkpoint, ascending by number."""
    if not root.is_dir():
        return []
    steps = ((step_of(path), path) for path in root.iterdir())
    return sorted(step for step, path in steps if step is not None and is_complete(path))


def abandon_steps(root: Path, after: int) -> list[Path]:
    """Rename what was saved after a step, which the run goes on from; return the new paths.

    Nothing is lost: under its new name a checkpoint can be exported or started from, but it is no
    step of the run any more.
    """
    if not root.is_dir():
        return []
    later = sorted(path for path in root.iterdir() if (step_of(path) or 0) > after)
    return [path.rename(_free_name(path)) for path in later]


def _free_name(step: Path) -> Path:
    name, number = step.name + ABANDONED, 1
    while step.with_name(name).exists():
        number += 1
        name = f"{step.name}{ABANDONED}-{number}"
    return step.with_name(name)


def is_complete(folder: Path) -> bool:
    """Say whether a folder holds a whole checkpoint: the manifest is the last file written."""
    return (folder / MANIFEST).is_file() and (folder / INDEX).is_file()
