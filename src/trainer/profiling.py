"""Profiler traces and memory snapshots of chosen steps, one file a rank under `profile/`.

Owns what is switched on around a step and where its files lie. Which steps is the config's
(`trainer.config.run.ProfileConfig`); the loops say when a step begins and ends.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from trainer.config.run import ProfileConfig
from trainer.errors import UserError
from trainer.saved_steps import step_folder

logger = logging.getLogger(__name__)


class StepProfiler:
    """Traces and snapshots the steps that the config names; costs nothing in all others.

    Traces (`step_N/trace-rank_R.json.gz`) open in Perfetto or chrome://tracing, snapshots
    (`step_N/memory-rank_R.pickle`) at pytorch.org/memory_viz. Numbers do not change; the times of a
    profiled step are longer, its files are written after its clock has stopped.

    Args:
        config: The `profile` section.
        folder: The run folder.
        device: Of this rank.
        rank: Of the world.

    Raises:
        UserError: memory snapshots on a CPU.
    """

    def __init__(
        self, config: ProfileConfig, folder: Path, device: torch.device, rank: int
    ) -> None:
        if config.memory_steps and device.type != "cuda":
            raise UserError(
                f"profile.memory_steps={list(config.memory_steps)} on a CPU: snapshots are of the "
                "GPU allocator; remove it, or use profile.trace_steps, which count memory too"
            )
        self._config = config
        self._folder = folder / "profile"
        self._device = device
        self._rank = rank

    def warn_of_past_steps(self, resumed_from: int) -> None:
        """Say which of the chosen steps a resumed run does not come by any more (rank 0)."""
        chosen = {
            "trace_steps": self._config.trace_steps,
            "memory_steps": self._config.memory_steps,
        }
        for name, steps in chosen.items():
            past = [step for step in steps if step <= resumed_from]
            if past and self._rank == 0:
                logger.warning(
                    "profile.%s=%s: %s are not profiled, the run resumes from step %d",
                    name,
                    list(steps),
                    past,
                    resumed_from,
                )

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Profile what happens inside, if `step` (from 1) is one of those chosen."""
        with ExitStack() as stack:
            if step in self._config.memory_steps:
                stack.enter_context(self._memory_snapshot(step))
            if step in self._config.trace_steps:
                stack.enter_context(self._trace(step))
            yield

    @contextmanager
    def _trace(self, step: int) -> Iterator[None]:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(
            activities=activities,
            record_shapes=True,
            profile_memory=True,
            acc_events=True,  # unset, torch 2.11 warns of earlier cycles' events; there are none
        )
        with profiler, record_function(f"step {step}"):
            yield
        path = self._path(step, "trace", "json.gz")
        profiler.export_chrome_trace(str(path))
        logger.info("profiler trace of step %d: %s", step, path)

    @contextmanager
    def _memory_snapshot(self, step: int) -> Iterator[None]:
        torch.cuda.memory._record_memory_history()
        try:
            yield
        finally:
            # Also after an error: out of memory is what snapshots are for.
            path = self._path(step, "memory", "pickle")
            torch.cuda.memory._dump_snapshot(str(path))
            torch.cuda.memory._record_memory_history(enabled=None)
            logger.info("memory snapshot of step %d: %s", step, path)

    def _path(self, step: int, what: str, suffix: str) -> Path:
        folder = step_folder(self._folder, step)
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{what}-rank_{self._rank}.{suffix}"
