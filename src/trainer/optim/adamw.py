"""AdamW for the param groups that Muon does not orthogonalize, as dion computes it.

Owns one step over plain local tensors. The recurrence, per element:

    m <- beta1 * m + (1 - beta1) * g        v <- beta2 * v + (1 - beta2) * g^2
    w <- w * (1 - lr * weight_decay) - lr * m_hat / (sqrt(v_hat) + epsilon)

with m_hat, v_hat corrected for bias by the device's step count. Cautious decay leaves out elements
where m and w disagree in sign. Arithmetic is torch's fused kernel, on CPU and GPU alike.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from trainer.optim.fused import found_inf, in_step


@dataclass(frozen=True)
class AdamWSettings:
    """Hyperparameters of one step, named as in dion's param groups."""

    lr: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    cautious_wd: bool


@dataclass(frozen=True)
class AdamWTensors:
    """One parameter's local tensors; `step` is a 0-d float32 on the parameter's device."""

    weight: Tensor
    gradient: Tensor
    momentum: Tensor
    variance: Tensor
    step: Tensor


def adamw_step_(
    parameters: Sequence[AdamWTensors], settings: AdamWSettings, gate: Tensor | None
) -> None:
    """Update parameters in place, all of them under one gate.

    Args:
        parameters: What to update.
        settings: How.
        gate: 0-d bool on the device; False leaves weights, state and step counts as they are.
    """
    if not parameters:
        return
    steps = [parameter.step for parameter in parameters]
    if gate is None:
        torch._foreach_add_(steps, 1.0)
    else:
        # One for each: given a single 0-d tensor, torch reads it on the host, as a number.
        torch._foreach_add_(steps, [gate.to(torch.float32)] * len(steps))
    by_dtype: dict[torch.dtype, list[AdamWTensors]] = defaultdict(list)
    for parameter in parameters:
        if parameter.weight.numel():
            by_dtype[parameter.weight.dtype].append(parameter)
    for same_dtype in by_dtype.values():
        if settings.cautious_wd and settings.weight_decay:
            for parameter in same_dtype:  # one at a time: each needs a copy of its weight
                _cautious_step_(parameter, settings, gate)
        else:
            _step_(same_dtype, settings, gate)


def _step_(
    parameters: Sequence[AdamWTensors], settings: AdamWSettings, gate: Tensor | None
) -> None:
    _fused_step_([p for p in parameters if _is_uniform(p)], settings, gate)
    for parameter in parameters:
        if not _is_uniform(parameter):
            _mixed_step_(parameter, settings, gate)


def _is_uniform(parameter: AdamWTensors) -> bool:
    return parameter.weight.dtype == parameter.momentum.dtype == parameter.variance.dtype


def _mixed_step_(parameter: AdamWTensors, settings: AdamWSettings, gate: Tensor | None) -> None:
    """Step in a dtype that holds all: a restored state keeps its own, the kernel takes one."""
    held = parameter.weight, parameter.momentum, parameter.variance
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in held))
    weight, momentum, variance = (tensor.to(dtype) for tensor in held)
    wide = replace(parameter, weight=weight, momentum=momentum, variance=variance)
    _fused_step_([wide], settings, gate)
    for tensor, changed in zip(held, (weight, momentum, variance), strict=True):
        tensor.copy_(changed)


def _fused_step_(
    parameters: Sequence[AdamWTensors], settings: AdamWSettings, gate: Tensor | None
) -> None:
    if not parameters:
        return
    with (
        in_step([p.weight for p in parameters]) as weights,
        in_step([p.momentum for p in parameters]) as momenta,
        in_step([p.variance for p in parameters]) as variances,
    ):
        torch._fused_adamw_(
            weights,
            [p.gradient.to(p.weight.dtype).contiguous() for p in parameters],
            momenta,
            variances,
            [],
            [p.step for p in parameters],
            amsgrad=False,
            lr=settings.lr,
            beta1=settings.beta1,
            beta2=settings.beta2,
            weight_decay=settings.weight_decay,
            eps=settings.epsilon,
            maximize=False,
            grad_scale=None,
            found_inf=found_inf(gate),
        )


def _cautious_step_(parameter: AdamWTensors, settings: AdamWSettings, gate: Tensor | None) -> None:
    """Step with full decay, then give back what elements of opposed sign should not have lost."""
    before = parameter.weight.clone()
    _step_([parameter], settings, gate)
    lost = before * (settings.lr * settings.weight_decay)
    is_owed = (parameter.momentum * before) < 0
    if gate is not None:
        is_owed &= gate
    parameter.weight.add_(torch.where(is_owed, lost, 0.0))
