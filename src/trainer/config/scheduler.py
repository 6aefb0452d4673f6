"""The `scheduler` section: how learning rates move over the run, and how long each phase lasts.

Owns the lengths of the phases in steps (`phases`). The curve itself is `trainer.schedule`'s.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from trainer.config.base import CountOrZero, Fraction, Section

DEFAULT_DECAY_RATIO = 0.2


class SchedulerSection(Section):
    """Warm-up, as a fraction of the run or in steps."""

    ALTERNATIVES = (("warmup_ratio", "warmup_steps"),)

    warmup_ratio: Fraction | None = None
    """Part of the run; unset, and `warmup_steps` too: no warm-up."""
    warmup_steps: CountOrZero | None = None
    """In place of `warmup_ratio`."""

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        for ratio, steps in self.ALTERNATIVES:
            given = self.model_dump(include={ratio, steps}, exclude_none=True)
            if len(given) == 2:
                raise ValueError(
                    f"{ratio}={given[ratio]} and {steps}={given[steps]} are both given: one of "
                    "them says how long the phase lasts; remove the other"
                )
        return self


class ConstantConfig(SchedulerSection):
    """Warm up, then stay."""

    type: Literal["constant"] = "constant"


class LinearConfig(SchedulerSection):
    """Warm up, then fall in a line to `min_lr_ratio x lr` at the end."""

    type: Literal["linear"] = "linear"
    min_lr_ratio: Fraction = 0.0
    """Where the fall ends, as a part of `lr`."""


class CosineConfig(SchedulerSection):
    """Warm up, then fall along half a cosine to `min_lr_ratio x lr` at the end."""

    type: Literal["cosine"] = "cosine"
    min_lr_ratio: Fraction = 0.0
    """Where the fall ends, as a part of `lr`."""


class WSDConfig(SchedulerSection):
    """Warm up, stay, then decay over the last `decay_ratio` of the run (or `decay_steps`)."""

    ALTERNATIVES = (*SchedulerSection.ALTERNATIVES, ("decay_ratio", "decay_steps"))

    type: Literal["wsd"] = "wsd"
    decay_ratio: Fraction | None = None
    """Part of the run; unset, and `decay_steps` too: 0.2."""
    decay_steps: CountOrZero | None = None
    """In place of `decay_ratio`."""
    decay: Literal["linear", "cosine", "1-sqrt"] = "linear"
    min_lr_ratio: Fraction = 0.0
    """Where the decay ends, as a part of `lr`."""

    @model_validator(mode="after")
    def _ratios_fit(self) -> Self:
        warmup = self.warmup_ratio or 0.0
        decay = DEFAULT_DECAY_RATIO if self.decay_ratio is None else self.decay_ratio
        if self.warmup_steps is None and self.decay_steps is None and warmup + decay > 1:
            raise ValueError(
                f"warmup_ratio={warmup} and decay_ratio={decay} sum to more than 1: the run has no "
                "room for both; lower one"
            )
        return self


SchedulerConfig = Annotated[
    ConstantConfig | LinearConfig | CosineConfig | WSDConfig, Field(discriminator="type")
]


@dataclass(frozen=True)
class Phases:
    """How many steps a run warms up, stays and decays; they sum to its steps."""

    num_warmup: int
    num_stable: int
    num_decay: int


def phases(config: SchedulerConfig, max_steps: int) -> Phases:
    """Return the lengths of the phases of a run of `max_steps`; ratios are rounded down.

    Raises:
        ValueError: warm-up and decay do not fit into the run.
    """
    num_warmup = _steps(config.warmup_steps, config.warmup_ratio or 0.0, max_steps)
    match config:
        case ConstantConfig():
            num_decay = 0
        case LinearConfig() | CosineConfig():
            num_decay = max(0, max_steps - num_warmup)
        case WSDConfig():
            ratio = DEFAULT_DECAY_RATIO if config.decay_ratio is None else config.decay_ratio
            num_decay = _steps(config.decay_steps, ratio, max_steps)
    num_stable = max_steps - num_warmup - num_decay
    if num_stable < 0:
        given = config.model_dump(
            include={"warmup_ratio", "warmup_steps", "decay_ratio", "decay_steps"},
            exclude_none=True,
        )
        fields = " and ".join(f"scheduler.{name}={value}" for name, value in given.items())
        raise ValueError(
            f"{fields} with max_steps={max_steps}: {num_warmup} warm-up and {num_decay} decay "
            "steps exceed the run; lower them, give ratios, or raise max_steps"
        )
    return Phases(num_warmup, num_stable, num_decay)


def _steps(steps: int | None, ratio: float, max_steps: int) -> int:
    return math.floor(ratio * max_steps) if steps is None else steps
