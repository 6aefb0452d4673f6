"""The run folder: who may write into it, and the config files in it.

Layout (design: others' scripts rely on it): `config.toml` of the first launch,
`config.resume-N.toml` of the N-th resume, `metrics.jsonl`, `plan.json`, `checkpoints/step_N/`,
`weights/step_N/`.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from trainer.checkpoint import CheckpointStore
from trainer.checkpoint.manifest import check_files, read_manifest
from trainer.config import RunConfig
from trainer.config.dump import dump_config
from trainer.durable import hold, sync_path
from trainer.errors import UserError
from trainer.metrics import RECORD
from trainer.saved_steps import CHECKPOINTS, WEIGHTS, abandon_steps, list_steps, step_folder

logger = logging.getLogger(__name__)

FOLDERS = (CHECKPOINTS, WEIGHTS)
CONFIG, PLAN = "config.toml", "plan.json"
TRACES = (CONFIG, RECORD, *FOLDERS)


@contextmanager
def held_output_dir(output_dir: str) -> Iterator[None]:
    """Keep the folder to this run; a new one goes again if the run puts nothing into it.

    Raises:
        UserError: another run is writing there, or this one cannot.
    """
    folder = Path(output_dir)
    with ExitStack() as stack:
        with naming(output_dir):
            stack.enter_context(hold(folder))
            for place in (folder / name for name in FOLDERS):
                if place.exists() and not place.is_dir():
                    raise NotADirectoryError(f"{place} is no folder")
        yield


@contextmanager
def naming(output_dir: str) -> Iterator[None]:
    """Give the system's refusal to write the name of the folder that the user typed.

    Raises:
        UserError: the block raised an OSError.
    """
    try:
        yield
    except BlockingIOError:
        raise UserError(
            f"output_dir={output_dir!r}: another run is writing there; wait until it ends, or "
            "choose another"
        ) from None
    except OSError as error:
        raise UserError(
            f"output_dir={output_dir!r}: a run cannot write there ({error}); choose another, or "
            "make room"
        ) from error


def free_output_dir(output_dir: str) -> None:
    """Take back what a run that was refused before its first step has written into its folder.

    Whoever mends the cause launches the same command again.
    """
    folder = Path(output_dir)
    if not (folder / CHECKPOINTS).exists():
        for name in (CONFIG, RECORD, PLAN):
            (folder / name).unlink(missing_ok=True)


def resolve_resume(config: RunConfig, store: CheckpointStore) -> int | None:
    """Return the step to resume from, or None for a fresh start.

    Raises:
        UserError: the folder holds another run and `ckpt.resume` is unset. A step asked for and
            not there is refused by the store, when it is read.
    """
    folder, resume = Path(config.output_dir), config.ckpt.resume
    if resume is None:
        held = [name for name in TRACES if (folder / name).exists()]
        if held:
            raise UserError(
                f"output_dir={config.output_dir!r} holds another run ({', '.join(held)}): a run "
                "needs a folder of its own; choose another output_dir, or continue that run (start "
                "it over, if it has no checkpoint yet) with ckpt.resume = 'latest'"
            )
        return None
    if resume != "latest":
        return resume
    latest = store.latest()
    if latest is None:
        logger.warning("ckpt.resume='latest': no checkpoint in %s, starting fresh", folder)
    return latest


def leave_later_steps(config: RunConfig, step: int) -> None:
    """Set aside what the run saved after the step that it goes on from.

    As the record is cut there, the run's later course is another one: neither "latest" nor the
    weights of a later step may come from the course that is left.
    """
    for name in FOLDERS:
        root = Path(config.output_dir) / name
        left = abandon_steps(root, step)
        if left:
            sync_path(root)
            logger.warning(
                "the run goes on from step %d: what it had saved after that is set aside as %s",
                step,
                ", ".join(map(str, left)),
            )


def origin_of(config: RunConfig) -> str | None:
    """Return where network and tokenizer are read from: `model.name`, on a resume the checkpoint.

    So a run goes on though what it started from has moved, or the hub cannot be reached. Another
    `model.name` than the checkpoint's is read all the same, and must fit it.

    Raises:
        UserError: the checkpoint is damaged, or this user may not look into the folder.
    """
    name, root = config.model.name, Path(config.output_dir) / CHECKPOINTS
    with naming(config.output_dir):
        steps = list_steps(root)
    step = max(steps, default=None) if config.ckpt.resume == "latest" else config.ckpt.resume
    if name is None or step not in steps:
        return name
    folder = step_folder(root, step)
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    saved = manifest.progress.get("config", {}).get("model", {})
    return str(folder) if saved.get("name") == name else name


def write_config(config: RunConfig, *, resumed: bool) -> Path:
    """Write the resolved config under the name that the launch calls for; return its path."""
    folder = Path(config.output_dir)
    path = folder / CONFIG
    if resumed:
        number = 1
        while (path := folder / f"config.resume-{number}.toml").exists():
            number += 1
    path.write_text(dump_config(config), encoding="utf-8")
    return path
