"""Learning-rate schedules: one factor a step, from transformers' warm-up/stable/decay curve.

Owns the mapping from the `scheduler` section to that curve. Does not own learning rates: the step
multiplies each param group's configured rate by the factor, so a rate changed on resume holds at
once and the only state is the number of steps applied.
"""

from collections.abc import Callable

import torch
from transformers import get_wsd_schedule

from trainer.config.scheduler import (
    ConstantConfig,
    CosineConfig,
    LinearConfig,
    Phases,
    SchedulerConfig,
    WSDConfig,
    phases,
)


def build_schedule(config: SchedulerConfig, max_steps: int) -> Callable[[int], float]:
    """Return the learning-rate factor as a function of the steps applied so far.

    During warm-up the n-th step (from 1) gets n / warm-up steps, so that no step is wasted at zero;
    a decay starts at 1 on its first step and would reach `min_lr_ratio` one step after the last.

    Args:
        config: The `scheduler` section.
        max_steps: Steps of the whole run; ratios are of this.

    Raises:
        ValueError: warm-up and decay do not fit into `max_steps`.

    Source: `transformers.get_wsd_schedule`, whose stable or decay phase may be empty.
    """
    match config:
        case ConstantConfig():
            shape, floor = "linear", 0.0
        case LinearConfig():
            shape, floor = "linear", config.min_lr_ratio
        case CosineConfig():
            shape, floor = "cosine", config.min_lr_ratio
        case WSDConfig():
            shape, floor = config.decay, config.min_lr_ratio
    lengths = phases(config, max_steps)
    curve = _wsd_curve(lengths, shape, floor)

    def factor(num_applied: int) -> float:
        if num_applied < lengths.num_warmup:
            return (num_applied + 1) / lengths.num_warmup
        return curve(num_applied)

    return factor


def _wsd_curve(lengths: Phases, shape: str, floor: float) -> Callable[[int], float]:
    placeholder = torch.optim.SGD([torch.zeros(())], lr=1.0)
    schedule = get_wsd_schedule(
        placeholder,
        num_warmup_steps=lengths.num_warmup,
        num_stable_steps=lengths.num_stable,
        num_decay_steps=lengths.num_decay,
        decay_type=shape,
        min_lr_ratio=floor,
    )
    return schedule.lr_lambdas[0]
