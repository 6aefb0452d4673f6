"""The loop that SFT and pretraining share: batch, step, log, evaluate, save.

Owns the order. What a run consists of is put together in `assembly.py`; what a step does is
`trainer.step`; what is measured is `record.py`.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from trainer.clock import Clock
from trainer.config import SupervisedConfig
from trainer.data import Pack, pack_fill
from trainer.errors import UserError
from trainer.loops.due import is_due
from trainer.loops.run import Run
from trainer.parallel.agreement import Ranks
from trainer.parallel.watchdog import set_phase
from trainer.step import StepTotals


class PackStream(Protocol):
    """An endless stream of packs in one global order, the same on every rank."""

    @property
    def counts(self) -> Mapping[str, float]:
        """What was read and left out so far, by reason."""
        ...

    def next_packs(self, num_packs: int) -> list[Pack]:
        """Return the next packs of the global order."""
        ...

    def state_dict(self) -> dict:
        """Return the position after the last pack taken, as JSON."""
        ...

    def load_state_dict(self, state: dict) -> None:
        """Continue from a position."""


def train(
    run: Run,
    config: SupervisedConfig,
    stream: PackStream,
    evaluate: Callable[[], dict[str, float]],
) -> None:
    """Train from where the run stands to `max_steps`.

    Args:
        run: Resumed if it was to be.
        config: Of the run.
        stream: Where the run stands in the data.
        evaluate: Measures the model as it is, by metric name; called by all ranks together.

    Raises:
        UserError: there are no more data, or a row cannot be used; the state is saved.
        Interrupted: a signal asked for an end; `open_run` saves the state.
        RuntimeError: the run has diverged.

    Collective: every rank runs every step, evaluation and save together.
    """
    if not run.is_evaluated:
        run.evaluate(evaluate)
    while run.progress.step < config.max_steps:
        with run.profiler.step(run.progress.step + 1):
            clock = Clock(run.device)
            clock.mark("start")
            set_phase("data", is_timed=False)
            packs = _next_packs(run, config, stream)
            record = run.step(clock, run.micro_batches(packs, config.data), StepTotals.of(packs))
        fill = pack_fill(packs, config.data.seq_len)
        run.log(record, {"data/pack_fill": fill} | _data_counts(stream))
        if is_due(config.val.interval, record.step, config.max_steps):
            run.evaluate(evaluate)
        run.stop_if_asked()
        run.save_if_due(stream.state_dict())


def _next_packs(run: Run, config: SupervisedConfig, stream: PackStream) -> list[Pack]:
    """Return a step's packs; where any rank has none, save what was trained before saying so."""
    position = stream.state_dict()
    try:
        return Ranks().together(lambda: stream.next_packs(config.data.batch_size))
    except UserError as error:
        step = run.progress.step
        if step == 0:
            raise
        run.save_if_due(position, now=True)
        raise UserError(f"{error}; the state after step {step} is saved") from None


def _data_counts(stream: PackStream) -> dict[str, float]:
    return {f"data/{reason}": count for reason, count in stream.counts.items()}
