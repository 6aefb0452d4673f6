"""What a person watching the run sees: a bar with ETA, or plain lines without a terminal."""

import logging
import os
import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from trainer.metrics import Metrics

logger = logging.getLogger(__name__)

LINES_A_RUN = 20


class Output(Console):
    """Standard output, which may fail (`| head`, a full disk): the run goes on."""

    def on_broken_pipe(self) -> None:
        """Write nowhere from now on; rich would end the process."""
        self.write_nowhere("nobody reads standard output any more")

    def write_nowhere(self, reason: str) -> None:
        """Drop what cannot be written, and all that follows."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        logger.warning("%s: the run goes on in metrics.jsonl", reason)


class Display:
    """Shows steps as they complete; rank 0 only.

    Args:
        max_steps: Steps of the run.
        start: Steps done before (a resume).
        kind: `SFT`, `RL`, `pretrain`: the bar's title.
    """

    def __init__(self, max_steps: int, start: int, kind: str) -> None:
        self.console = Output(stderr=False)
        self._max_steps, self._start, self._done = max_steps, start, start
        self._began = time.monotonic()
        self._every = max(1, max_steps // LINES_A_RUN)
        self._bar = Progress(
            TextColumn(f"[bold]{kind}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[values]}"),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("steps", total=max_steps, completed=start, values="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def step(self, step: int, metrics: Metrics) -> None:
        """Show that `step` is done, with its numbers."""
        values = _summary(metrics)
        self._done = step
        self._bar.update(self._task, completed=step, values=values)
        if not self.console.is_terminal and (step % self._every == 0 or step == self._max_steps):
            self.note(f"step {step}/{self._max_steps}  {values}  eta {self._eta()}")

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        try:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)
        except OSError as error:
            self.console.write_nowhere(f"standard output cannot be written ({error})")

    def _eta(self) -> str:
        a_step = (time.monotonic() - self._began) / max(1, self._done - self._start)
        seconds = round(a_step * (self._max_steps - self._done))
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


SHOWN = {
    "loss/mean": "loss {:.4f}",
    "reward/mean": "reward {:.3f}",
    "val/loss": "val {:.4f}",
    "optim/grad_norm": "norm {:.2f}",
    "perf/throughput": "{:,.0f} tok/s",
}


def _summary(metrics: Metrics) -> str:
    shown = [(template, metrics.get(name)) for name, template in SHOWN.items()]
    return "  ".join(template.format(value) for template, value in shown if value is not None)
