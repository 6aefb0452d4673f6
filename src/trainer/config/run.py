"""Sections about the run itself: checkpoints, logging, profiling."""

from typing import Annotated, Literal

from pydantic import Field

from trainer.config.base import Bool, Count, CountOrZero, Section


class CheckpointConfig(Section):
    """When state and weights are saved, and from where a run resumes."""

    interval: CountOrZero = 0
    """Save the training state every n steps, and at the end; 0: only at the end."""
    weights_interval: CountOrZero = 0
    """Save Hugging Face weights every n steps, and at the end; 0: only at the end."""
    weights_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    resume: Annotated[int, Field(strict=True, ge=0)] | Literal["latest"] | None = None
    keep_last: Count | None = None
    keep_every: Count | None = None
    asynchronous: Bool = False


class WandbConfig(Section):
    """Weights & Biases; without a key the run is offline and says so."""

    enabled: Bool = True
    project: str = "trainer"
    entity: str | None = None
    name: str | None = None
    tags: tuple[str, ...] = ()


class ProfileConfig(Section):
    """Profiler traces and memory snapshots of chosen steps, under `output_dir/profile`."""

    trace_steps: tuple[Count, ...] = ()
    """Steps whose operators, kernels and allocations are traced, a file a rank."""
    memory_steps: tuple[Count, ...] = ()
    """Steps whose GPU allocations are recorded with stacks, a file a rank; GPUs only."""
