"""A run that is under way: what is alive in it, and the record, saves and plan of it.

Owns when a step's record is written: one step later, or before a save, so that reading its values
waits for nothing else. Put together by `assembly.py`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig

from trainer.checkpoint import CheckpointStore
from trainer.config import RunConfig
from trainer.config.data import BatchConfig
from trainer.data import Pack, PackedBatch, micro_batches
from trainer.errors import Interrupted
from trainer.loops.display import Display
from trainer.loops.due import is_due
from trainer.loops.record import source_losses, step_metrics
from trainer.metrics import RECORD, Metrics, MetricsWriter, plain
from trainer.model.causal_lm import CausalLM
from trainer.model.export import save_hf_weights
from trainer.model.flops import training_flops
from trainer.parallel.agreement import Ranks
from trainer.parallel.signals import StopSignal
from trainer.parallel.watchdog import set_phase
from trainer.parallel.world import World
from trainer.profiling import StepProfiler
from trainer.progress import Progress
from trainer.saved_steps import CHECKPOINTS, WEIGHTS, step_folder
from trainer.step import StepRecord, TrainStep


@dataclass
class PendingRecord:
    """A step's record that waits for its values, and what else was measured after that step."""

    record: StepRecord
    more: dict[str, float] = field(default_factory=dict)


class Run:
    """A run that is under way.

    Args:
        config: Resolved.
        world: Of this process.
        tokenizer: Of the data; saved with the weights.
        step: Runs one optimizer step; holds model, optimizer and progress.
        store: Checkpoints.
        stop_signal: SIGTERM and SIGINT, agreed over ranks.
        source_names: Of the sources of data whose losses are recorded apart.

    Attributes:
        is_evaluated: Whether the evaluation that was due after the last step is done.
        profiler: Of the steps chosen by the config.
        writer: Metrics; rank 0 only.
        display: What a person sees; rank 0 only.
    """

    def __init__(
        self,
        config: RunConfig,
        world: World,
        tokenizer: PreTrainedTokenizerFast,
        step: TrainStep,
        store: CheckpointStore,
        stop_signal: StopSignal,
        source_names: Sequence[str] = (),
    ) -> None:
        self.config = config
        self.world = world
        self.tokenizer = tokenizer
        self.step = step
        self.store = store
        self.stop_signal = stop_signal
        self.source_names = tuple(source_names)
        self.folder = Path(config.output_dir)
        self.is_evaluated = True
        self.profiler = StepProfiler(config.profile, self.folder, world.device, world.rank)
        self.writer: MetricsWriter | None = None
        self.display: Display | None = None
        self._pending: PendingRecord | None = None
        self._last_metrics: dict[str, Any] = {}

    @property
    def device(self) -> torch.device:
        """Of this rank."""
        return self.world.device

    @property
    def model(self) -> CausalLM:
        """The sharded model."""
        return self.step.model

    @property
    def progress(self) -> Progress:
        """Counters of the run."""
        return self.step.progress

    @property
    def pad_id(self) -> int:
        """The token that fills packs and prompts."""
        assert isinstance(self.tokenizer.pad_token_id, int)
        return self.tokenizer.pad_token_id

    def micro_batches(self, packs: Sequence[Pack], data: BatchConfig) -> list[PackedBatch]:
        """Return this rank's part of a global batch, on its device, equally many on every rank."""
        batches = micro_batches(
            packs,
            rank=self.world.rank,
            world_size=self.world.size,
            micro_batch_size=data.micro_batch_size,
            seq_len=data.seq_len,
            pad_id=self.pad_id,
        )
        return [batch.to(self.device) for batch in batches]

    def log(self, record: StepRecord, more: dict[str, float]) -> None:
        """Take in a step's record; write that of the step before, whose values are there by now."""
        self.write_last_record()
        self._pending = PendingRecord(record, more)

    def write_last_record(self) -> None:
        """Write the last step's record, if it is still to be written."""
        step_metrics = self._take_pending()
        if step_metrics is not None:
            self._write(step_metrics["step"], step_metrics)

    def evaluate(self, measure: Callable[[], dict[str, float]]) -> None:
        """Add what is measured to the last step's record; what a signal ends is due on resume.

        Collective: as `measure`.
        """
        set_phase("evaluate")
        self.is_evaluated = False
        more = measure()
        self.is_evaluated = True
        if self._pending is not None:
            self._pending.more |= more
        elif self.writer is not None:
            self.writer.amend(self.progress.step, more)  # written before the resume

    def stop_if_asked(self) -> None:
        """Stop where a signal asked any rank to; the state is then saved (`open_run`).

        Raises:
            Interrupted: on all ranks.

        Collective: one all-reduce on the host.
        """
        signum = self.stop_signal.agreed()
        if signum is not None:
            raise Interrupted(signum)

    def save_if_due(self, data_position: dict[str, Any], *, now: bool = False) -> None:
        """Save state and weights where their intervals say so, or the state now.

        Collective: as `CheckpointStore.save` and `save_hf_weights`; every rank must call.
        """
        ckpt, step, last = self.config.ckpt, self.progress.step, self.config.max_steps
        state_due = now or is_due(ckpt.interval, step, last)
        weights_due = is_due(ckpt.weights_interval, step, last)
        if not (state_due or weights_due):
            return
        set_phase("save")
        self.step.settle()
        step_metrics = self._take_pending()
        began = time.perf_counter()
        if state_due:
            self.store.save(step, self.model, self.step.optimizer, self.state(data_position))
        if weights_due:
            self._save_weights(step)
        if step_metrics is not None:
            self._write(step, step_metrics | {"time/save_ckpt": time.perf_counter() - began})

    def save_missing_weights(self) -> None:
        """Write the weights that were due with the checkpoint, where a kill came in between.

        Collective: all ranks, one broadcast; then as `save_hf_weights`.
        """
        step = self.progress.step
        if not is_due(self.config.ckpt.weights_interval, step, self.config.max_steps):
            return
        if Ranks().on_first(lambda: not self._weights_folder(step).exists()):
            set_phase("save")
            self._save_weights(step)

    def state(self, data_position: dict[str, Any]) -> dict[str, Any]:
        """Return what a checkpoint keeps beside tensors, as plain JSON."""
        return {
            "progress": self.progress.state_dict(),
            "data": data_position,
            "config": self.config.model_dump(mode="json"),
            "metrics": self._last_metrics,
            "is_evaluated": self.is_evaluated,
        }

    def where_things_lie(self) -> list[str]:
        """Return lines for the person who watched: how far the run came, where its files are."""
        step, folder = self.progress.step, self.folder
        return [
            f"done: {step} steps, {self.progress.trained_tokens:,} trained tokens",
            f"  metrics     {folder / RECORD}",
            f"  checkpoint  {step_folder(folder / CHECKPOINTS, step)}",
            f"  weights     {self._weights_folder(step)} (Hugging Face layout)",
        ]

    def say(self, text: str) -> None:
        """Print a line for the person watching, from rank 0."""
        if self.display is not None:
            self.display.note(text)

    def _weights_folder(self, step: int) -> Path:
        return step_folder(self.folder / WEIGHTS, step)

    def _save_weights(self, step: int) -> None:
        folder, dtype = self._weights_folder(step), self.config.ckpt.weights_dtype
        save_hf_weights(self.model, self.tokenizer, folder, dtype)

    def _take_pending(self) -> dict[str, Any] | None:
        """Return the metrics of the pending record, which is then no longer pending."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        self._last_metrics = self._resolve(pending)
        return self._last_metrics

    def _resolve(self, pending: PendingRecord) -> dict[str, Any]:
        record = pending.record
        totals = record.totals
        metrics = step_metrics(
            record,
            self.progress.num_skipped,
            flops=training_flops(self.model.config, totals.num_tokens, totals.num_pairs),
            world_size=self.world.size,
            device=self.device,
            is_moe=isinstance(self.model.config, Qwen3MoeConfig),
        )
        by_source = source_losses(record, self.source_names)
        measured = {"step": record.step} | metrics | by_source | pending.more
        return {name: plain(value) for name, value in measured.items()}

    def _write(self, step: int, metrics: Metrics) -> None:
        if self.writer is not None:
            self.writer.write(step, metrics)
        if self.display is not None:
            self.display.step(step, metrics)
