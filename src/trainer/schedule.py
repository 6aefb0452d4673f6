"""Learning-rate schedules: one factor a step, from transformers' warm-up/stable/decay curve.

Owns the mapping from the `scheduler` section to that curve. Does not own learning rates: the step
multiplies each param group's configured rate by the factor, so a rate changed on resume holds at
once and the only state is the number of steps applied.
"""

import math
from collections.abc import Callable

import torch
from transformers import get_wsd_schedule

from trainer.config.scheduler import (
    ConstantConfig,
    CosineConfig,
    LinearConfig,
    SchedulerConfig,
    WSDConfig,
)
from trainer.errors import UserError


def build_schedule(config: SchedulerConfig, max_steps: int) -> Callable[[int], float]:
    """Return the learning-rate factor as a function of the steps applied so far.

    During warm-up the n-th step (from 1) gets n / warm-up steps, so that no step is wasted at zero;
    a decay starts at 1 on its first step and would reach `min_lr_ratio` one step after the last.

    Args:
        config: The `scheduler` section.
        max_steps: Steps of the whole run; ratios are of this.

    Raises:
        UserError: warm-up and decay do not fit into `max_steps`.

    Source: `transformers.get_wsd_schedule`, whose stable or decay phase may be empty.
    """
    num_warmup = _steps(config.warmup_steps, config.warmup_ratio, max_steps)
    match config:
        case ConstantConfig():
            num_decay, shape, floor = 0, "linear", 0.0
        case LinearConfig():
            num_decay, shape, floor = max_steps - num_warmup, "linear", config.min_lr_ratio
        case CosineConfig():
            num_decay, shape, floor = max_steps - num_warmup, "cosine", config.min_lr_ratio
        case WSDConfig():
            num_decay = _steps(config.decay_steps, config.decay_ratio, max_steps)
            shape, floor = config.decay, config.min_lr_ratio
    if num_warmup + num_decay > max_steps or num_decay < 0:
        raise UserError(
            f"scheduler: {num_warmup} warm-up and {max(num_decay, 0)} decay steps exceed "
            f"max_steps={max_steps}: the phases must fit into the run; "
            "lower scheduler.warmup_steps or scheduler.decay_steps, or give ratios"
        )
    curve = _wsd_curve(num_warmup, max_steps - num_warmup - num_decay, num_decay, shape, floor)

    def factor(num_applied: int) -> float:
        if num_applied < num_warmup:
            return (num_applied + 1) / num_warmup
        return curve(num_applied)

    return factor


def _steps(steps: int | None, ratio: float, max_steps: int) -> int:
    return math.floor(ratio * max_steps) if steps is None else steps


def _wsd_curve(
    num_warmup: int, num_stable: int, num_decay: int, shape: str, floor: float
) -> Callable[[int], float]:
    placeholder = torch.optim.SGD([torch.zeros(())], lr=1.0)
    schedule = get_wsd_schedule(
        placeholder,
        num_warmup_steps=num_warmup,
        num_stable_steps=num_stable,
        num_decay_steps=num_decay,
        decay_type=shape,
        min_lr_ratio=floor,
    )
    return schedule.lr_lambdas[0]
