"""Sections about the run itself: checkpoints, logging, profiling."""

from typing import Annotated, Literal

from pydantic import Field

from trainer.config.base import Bool, Count, CountOrZero, Section, Text


class CheckpointConfig(Section):
    """When state and weights are saved, and from where a run resumes."""

    interval: CountOrZero = 0
    """Save the training state every n steps, and at the end; 0: only at the end."""
    weights_interval: CountOrZero = 0
    """Save Hugging Face weights every n steps, and at the end; 0: only at the end."""
    weights_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Of the Hugging Face weights; checkpoints keep float32."""
    resume: Annotated[int, Field(strict=True, ge=0)] | Literal["latest"] | None = None
    """A step, or latest (a fresh start where there is none); unset: the folder must be new."""
    keep_last: Count | None = None
    """Newest checkpoints kept; unset: all."""
    keep_every: Count | None = None
    """Besides these, keep steps divisible by this."""
    asynchronous: Bool = False
    """Copy the state to host memory and write it while training goes on."""


class WandbConfig(Section):
    """Weights & Biases; without a key the run is offline and says so."""

    enabled: Bool = True
    project: Text = "trainer"
    entity: Text | None = None
    name: Text | None = None
    tags: tuple[Text, ...] = ()


class ProfileConfig(Section):
    """Profiler traces and memory snapshots of chosen steps, under `output_dir/profile`."""

    trace_steps: tuple[Count, ...] = ()
    """Steps whose operators, kernels and allocations are traced, a file a rank."""
    memory_steps: tuple[Count, ...] = ()
    """Steps whose GPU allocations are recorded with stacks, a file a rank; GPUs only."""
