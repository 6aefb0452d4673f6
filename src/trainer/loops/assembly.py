"""Puts a run together from its config: model, optimizer, checkpoints, record, display.

Owns what is alive during a run, and saving and resuming it. The order in which things happen is
the loops' (`supervised.py`); what a step does is `trainer.step`'s.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerFast

from trainer.checkpoint import CheckpointStore, compare_configs, refusal_message, start_model
from trainer.checkpoint.rng import seed_all
from trainer.config import RLConfig, RunConfig, SupervisedConfig
from trainer.errors import Interrupted, UserError
from trainer.loops.display import Display
from trainer.loops.plan_file import describe_plan, kernel_choices
from trainer.loops.run import Run
from trainer.loops.run_folder import (
    PLAN,
    free_output_dir,
    held_output_dir,
    leave_later_steps,
    naming,
    origin_of,
    resolve_resume,
    write_config,
)
from trainer.metrics import MetricsWriter
from trainer.model import setup_model
from trainer.model.causal_lm import CausalLM
from trainer.optim import setup_optimizer
from trainer.parallel import build_mesh
from trainer.parallel.agreement import Ranks
from trainer.parallel.signals import StopSignal
from trainer.parallel.watchdog import set_phase
from trainer.parallel.world import World, use_deterministic_algorithms
from trainer.progress import Progress
from trainer.saved_steps import CHECKPOINTS
from trainer.schedule import build_schedule
from trainer.step import Diverged, StepSettings, TrainStep

logger = logging.getLogger(__name__)


class Resumable(Protocol):
    """Where a run stands in its data, the same on every rank."""

    def state_dict(self) -> dict[str, Any]:
        """Return the place, as JSON."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place; a UserError if it means nothing under this config and data."""


@dataclass(frozen=True)
class RunParts:
    """What a run is put together from.

    Attributes:
        config: Resolved.
        world: Of this process.
        tokenizer: Of the data; saved with the weights.
        kind: The display's title.
        place: At its start; goes to the saved one before anything in the folder changes.
        source_names: Of the sources of data, to record the loss of each.
        build_more: Builds what else may fail, before anything in the folder changes; all ranks.
    """

    config: RunConfig
    world: World
    tokenizer: PreTrainedTokenizerFast
    kind: str
    place: Resumable
    source_names: Sequence[str] = ()
    build_more: Callable[[], None] | None = None


@contextmanager
def open_run(parts: RunParts) -> Iterator[tuple[Run, bool]]:
    """Build everything a run needs, resume it if asked, and close it in order.

    Yields:
        The run, and whether it goes on from a checkpoint.

    Raises:
        UserError: the folder holds another run or is another's at this moment, the ranks hold
            different data, or the checkpoint does not fit; on all ranks.
        Interrupted: a signal asked for an end; the state is saved.

    Collective: all ranks; one all-gather of digests of the data; building the mesh, the model and
        the optimizer, then loading.
    """
    config, world = parts.config, parts.world
    use_deterministic_algorithms(config.deterministic, world.device)
    seed_all(config.seed)
    ranks = Ranks()
    _check_equality(ranks, parts.place)
    with ExitStack() as stack:
        ranks.on_first(lambda: stack.enter_context(held_output_dir(config.output_dir)), UserError)
        run, is_resumed = _set_up(parts, ranks, stack)
        try:
            yield run, is_resumed
        except Interrupted:
            run.save_if_due(parts.place.state_dict(), now=True)
            run.store.wait()  # a write in the background is the checkpoint that was promised
            raise
        except UserError:
            run.store.wait()  # so is the one that a refusal in mid-run speaks of
            if world.is_first and run.progress.step == 0:
                free_output_dir(config.output_dir)
            raise
        except Diverged:
            run.write_last_record()
            run.store.wait()  # the last finite state is worth most now
            raise
        run.store.wait()


def _set_up(parts: RunParts, ranks: Ranks, stack: ExitStack) -> tuple[Run, bool]:
    """Return the run, and whether it goes on from a checkpoint; see `open_run`."""
    config, world = parts.config, parts.world
    store = _open_store(config, parts.tokenizer)
    resume_step = ranks.on_first(lambda: resolve_resume(config, store), UserError)
    saved = None if resume_step is None else store.read_progress(resume_step)
    if saved is not None:
        _check_saved(saved, config, world)
    set_phase("set-up", is_timed=False)
    step = _build_step(config, world, saved, len(parts.source_names))
    _check_vocabulary(step.model.config.vocab_size, parts.tokenizer)
    if resume_step is not None:
        store.load(resume_step, step.model, step.optimizer)
    if saved is not None:
        position = saved["data"]
        ranks.together(lambda: parts.place.load_state_dict(position))
    if parts.build_more is not None:
        parts.build_more()
    stop_signal = stack.enter_context(StopSignal(has_launcher=world.size > 1))
    run = Run(config, world, parts.tokenizer, step, store, stop_signal, parts.source_names)
    _open_record(run, saved, parts.kind, stack, ranks)
    if world.is_first:
        _warn_of_positions(config, step.model.config.max_position_embeddings)
    if saved is not None:
        run.is_evaluated = saved.get("is_evaluated", True)  # absent in older versions' checkpoints
        run.profiler.warn_of_past_steps(step.progress.step)
        run.save_missing_weights()
    return run, saved is not None


def _open_store(config: RunConfig, tokenizer: PreTrainedTokenizerFast) -> CheckpointStore:
    return CheckpointStore(
        Path(config.output_dir) / CHECKPOINTS,
        keep_last=config.ckpt.keep_last,
        keep_every=config.ckpt.keep_every,
        asynchronous=config.ckpt.asynchronous,
        tokenizer=tokenizer,
    )


def _build_step(
    config: RunConfig, world: World, saved: dict[str, Any] | None, num_sources: int
) -> TrainStep:
    mesh = build_mesh(config.parallel, world.device.type)
    reshard = config.parallel.reshard_after_forward
    if saved is None:
        model = start_model(config.model, mesh, seed=config.seed, reshard_after_forward=reshard)
    else:
        origin = Ranks().together(lambda: origin_of(config))
        network = config.model.model_copy(update={"name": origin})
        model = setup_model(network, mesh, reshard_after_forward=reshard, fill=leave_to_load)
    optimizer = setup_optimizer(config.optim, model.named_parameters(), mesh)
    settings = StepSettings(
        load_balancing_coef=config.model.load_balancing_coef,
        max_norm=config.optim.max_norm,
        max_skipped_steps=config.optim.max_skipped_steps,
        num_sources=num_sources,
    )
    progress = Progress() if saved is None else Progress.from_state(saved["progress"])
    factor = build_schedule(config.scheduler, config.max_steps)
    return TrainStep(model, optimizer, factor, settings, progress)


def leave_to_load(model: CausalLM) -> None:
    """Give a model no values: the checkpoint that is loaded next has them all."""


def _open_record(
    run: Run, saved: dict[str, Any] | None, kind: str, stack: ExitStack, ranks: Ranks
) -> None:
    """Open metrics and display and write the folder's files, on rank 0."""

    def open_on_first() -> None:
        config = run.config
        resume_step = None if saved is None else run.progress.step
        writer = MetricsWriter(
            run.folder,
            config.wandb,
            config.model_dump(mode="json") | {"kernels": kernel_choices(run.step.optimizer)},
            resume_step=resume_step,
        )
        run.writer = stack.enter_context(writer)
        if resume_step is not None:
            leave_later_steps(config, resume_step)
        # After wandb may have refused: the folder of a refused run is free.
        write_config(config, resumed=saved is not None)
        plan = describe_plan(run.step.optimizer)
        (run.folder / PLAN).write_text(json.dumps(plan, indent=1) + "\n")
        if saved is not None and saved["metrics"]:  # none before the first step
            run.writer.restore(run.progress.step, saved["metrics"])
        run.display = stack.enter_context(Display(config.max_steps, run.progress.step, kind))

    def open_or_leave_free() -> None:
        try:
            open_on_first()
        except (UserError, OSError):
            if saved is None:
                free_output_dir(run.config.output_dir)
            raise

    with naming(run.config.output_dir):
        ranks.on_first(open_or_leave_free, UserError, OSError)


def _check_equality(ranks: Ranks, place: Resumable) -> None:
    """Refuse data that differ between ranks: each would deal itself packs of another order."""
    digest = hashlib.blake2b(json.dumps(place.state_dict(), sort_keys=True).encode()).digest()
    if len(set(ranks.gather(digest))) > 1:
        raise UserError(
            "the ranks hold different data: data.source (env.source) or val.source is not the same "
            "on every rank; give all nodes the same files, and seed a function's random numbers "
            "(a set has another order in every process)"
        )


def _check_vocabulary(vocab_size: int, tokenizer: PreTrainedTokenizerFast) -> None:
    # Ids may have gaps, so there may be fewer tokens than the largest id says.
    num_ids = max(tokenizer.get_vocab().values(), default=-1) + 1
    if num_ids > vocab_size:
        raise UserError(
            f"the tokenizer's ids reach {num_ids - 1}, the model's vocab_size={vocab_size}: "
            "every token needs a row; raise model.architecture.vocab_size, or give the tokenizer "
            "that belongs to the model in data.tokenizer"
        )


def _warn_of_positions(config: RunConfig, max_position_embeddings: int) -> None:
    if isinstance(config, SupervisedConfig | RLConfig) and (
        config.data.seq_len > max_position_embeddings
    ):
        logger.warning(
            "data.seq_len=%d exceeds the model's max_position_embeddings=%d: positions restart "
            "with every document, but a longer one has positions that its readers may refuse; "
            "lower data.seq_len, or raise model.architecture.max_position_embeddings",
            config.data.seq_len,
            max_position_embeddings,
        )


def _check_saved(saved: dict[str, Any], config: RunConfig, world: World) -> None:
    """Refuse a checkpoint that this run cannot go on from; log what changed since it.

    Raises:
        UserError: it is not of a loop of this trainer, is beyond the run, or is of another run.
    """
    missing = {"progress", "data", "config", "metrics"} - saved.keys()
    if missing or saved["progress"].keys() != Progress().state_dict().keys():
        raise UserError(
            f"ckpt.resume={config.ckpt.resume!r}: the checkpoint's progress is not that of a run "
            "of this trainer; resume from another step, or start a new run from its weights with "
            "model.name"
        )
    if saved["progress"]["step"] > config.max_steps:
        raise UserError(
            f"max_steps={config.max_steps}: the checkpoint is of step {saved['progress']['step']}, "
            "beyond the run's end; raise max_steps, or name an earlier step in ckpt.resume"
        )
    allowed, refused = compare_configs(saved["config"], config.model_dump(mode="json"))
    if refused:
        raise UserError(refusal_message(refused))
    if world.is_first:
        for change in allowed:
            logger.info("changed since the checkpoint: %s", change)
