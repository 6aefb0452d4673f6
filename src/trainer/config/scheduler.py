"""The `scheduler` section: how learning rates move over the run."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from trainer.config.base import CountOrZero, Fraction, Section


class SchedulerSection(Section):
    """Warm-up, as a fraction of the run or in steps (steps win)."""

    warmup_ratio: Fraction = 0.0
    warmup_steps: CountOrZero | None = None
    """Wins over `warmup_ratio`."""


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

    type: Literal["wsd"] = "wsd"
    decay_ratio: Fraction = 0.2
    decay_steps: CountOrZero | None = None
    """Wins over `decay_ratio`."""
    decay: Literal["linear", "cosine", "1-sqrt"] = "linear"
    min_lr_ratio: Fraction = 0.0
    """Where the decay ends, as a part of `lr`."""

    @model_validator(mode="after")
    def _phases_fit(self) -> Self:
        if (
            self.warmup_steps is None
            and self.decay_steps is None
            and self.warmup_ratio + self.decay_ratio > 1
        ):
            raise ValueError(
                f"warmup_ratio={self.warmup_ratio} and decay_ratio={self.decay_ratio} sum to more "
                "than 1: the run has no room for both; lower one"
            )
        return self


SchedulerConfig = Annotated[
    ConstantConfig | LinearConfig | CosineConfig | WSDConfig, Field(discriminator="type")
]
