"""The record of a run: `metrics.jsonl` and wandb, one object a step on one axis across resumes.

Owns names that reach both places, the cut on resume and wandb's offline fallback. Does not compute
values (`trainer.step`) or draw them (`trainer.loops.display`).
"""

import json
import logging
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import wandb

from trainer.config.run import WandbConfig
from trainer.errors import UserError

logger = logging.getLogger(__name__)

RECORD = "metrics.jsonl"
"""In a run's folder."""

Metrics = Mapping[str, float | int | None]


class MetricsWriter:
    """Appends one JSON object a step to `metrics.jsonl` and the same to wandb.

    Only rank 0 holds one. The JSON file is always written; lines are flushed one by one.

    Args:
        folder: The run folder.
        config: The `wandb` section.
        run_config: The resolved config, as wandb shows it.
        resume_step: Step of the checkpoint that the run continues from; later lines are cut.
    """

    def __init__(
        self,
        folder: Path,
        config: WandbConfig,
        run_config: Mapping[str, Any],
        *,
        resume_step: int | None = None,
    ) -> None:
        # First, so that a run which wandb refuses leaves the record as it was.
        self._wandb = _start_wandb(folder, config, run_config) if config.enabled else None
        self.path = folder / RECORD
        if resume_step is None:
            self.path.write_text("")
        else:
            cut_after(self.path, resume_step)
        self._file = self.path.open("a")

    def write(self, step: int, metrics: Metrics) -> None:
        """Record one step; a value that is not finite is written as null."""
        record = {"step": step} | {name: plain(value) for name, value in metrics.items()}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        if self._wandb is not None:
            self._wandb.log(record)

    def restore(self, step: int, metrics: Metrics) -> None:
        """Write the line of a checkpoint's step again, if a kill took it before it was written."""
        last = _read_lines(self.path)[-1:]
        if not last or _step_of(last[0]) < step:
            self.write(step, metrics)

    def amend(self, step: int, more: Metrics) -> None:
        """Add to the line of `step`, the last one."""
        added = {name: plain(value) for name, value in more.items()}
        *earlier, last = _read_lines(self.path)
        amended = json.dumps(json.loads(last) | added, allow_nan=False)
        self._file.close()
        _replace_lines(self.path, [*earlier, amended])
        self._file = self.path.open("a")
        if self._wandb is not None:
            self._wandb.log({"step": step} | added)

    def close(self, *, has_failed: bool = False) -> None:
        """Flush and close both records; wandb shows a run that failed as such."""
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(has_failed))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(has_failed=kind is not None)


def cut_after(path: Path, step: int) -> None:
    """Keep the lines of `metrics.jsonl` up to `step`, replacing the file in one move.

    A line that a kill left half-written is dropped too: it belongs to a step after the checkpoint.
    So is one that is no record.
    """
    if not path.exists():
        return
    _replace_lines(path, [line for line in _read_lines(path) if _step_of(line) <= step])


def _replace_lines(path: Path, lines: Sequence[str]) -> None:
    beside = path.with_suffix(".cut")
    beside.write_text("".join(line + "\n" for line in lines))
    beside.replace(path)


def _read_lines(path: Path) -> list[str]:
    # A machine that stops may leave any bytes at the end of a file.
    return path.read_text(errors="replace").splitlines()


def _step_of(line: str) -> float:
    try:
        match json.loads(line):
            case {"step": int(step)}:
                return step
            case _:
                return math.inf
    except ValueError:
        return math.inf


def plain(value: float | int | None) -> float | int | None:
    """Return a number that JSON can hold: None for one that is not finite."""
    return None if value is None or not math.isfinite(value) else value


def _start_wandb(folder: Path, config: WandbConfig, run_config: Mapping[str, Any]) -> Any:
    mode = _wandb_mode()
    if mode == "offline":
        logger.info("wandb runs offline (no API key): `wandb sync %s` uploads it", folder / "wandb")
    try:
        run = wandb.init(
            project=config.project,
            entity=config.entity,
            name=config.name,
            tags=list(config.tags),
            id=_run_id(folder),
            resume="allow" if mode == "online" else None,
            dir=str(folder),
            config=dict(run_config),
            mode=mode,
            settings=wandb.Settings(silent=True, console="off"),
        )
    except (wandb.Error, ValueError) as error:
        raise UserError(
            f"wandb.project={config.project!r}, wandb.tags={list(config.tags)}: wandb refused the "
            f"run ({error}); log in again, correct [wandb], or set wandb.enabled = false"
        ) from error
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def _wandb_mode() -> Literal["online", "offline", "disabled"]:
    match os.environ.get("WANDB_MODE"):
        case ("online" | "offline" | "disabled") as mode:
            return mode
        case _:
            return "online" if wandb.login(prompt=False, verify=False) else "offline"


def _run_id(folder: Path) -> str:
    """One id for the run and all its resumes: wandb then keeps one curve."""
    path = folder / "wandb_id"
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text().strip()
