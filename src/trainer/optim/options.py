"""Muon's settings: what never enters the state, what a param group may say, the plan they make.

Owns `MuonOptions`, the checks of a group's hyperparameters and members, and the choice of each
bucket's kernel. The plan itself is `plan.py`'s.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.errors import UserError
from trainer.optim.coefficients import CoefficientTable, resolve_coefficients
from trainer.optim.groups import NamedGroup
from trainer.optim.kernels.select import KernelChoice, choose_kernel
from trainer.optim.pipeline import NS_DTYPES
from trainer.optim.plan import Plan, PlannedGroup, PlanOptions, build_plan
from trainer.optim.state import as_matrices, local


@dataclass(frozen=True)
class MuonOptions:
    """How the update is computed; never part of the state. Fields are those of `[optim]`."""

    impl: Literal["stacked", "per_matrix"] = "stacked"
    kernel: Literal["auto", "dense", "symmetric", "gram", "syrk"] = "auto"
    ns_steps: int = 5
    ns_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    ns_coefficients: CoefficientTable = "quintic"
    replicate: Literal["share", "repeat"] = "share"
    max_stack_gib: float = 2.0
    split_gate_up: bool = False
    stats_interval: int = 0


def check_options(options: MuonOptions) -> None:
    """Check the options that no later step of construction checks.

    Raises:
        UserError: naming the field as in `[optim]`.
    """
    for field, value, allowed in (
        ("impl", options.impl, ("stacked", "per_matrix")),
        ("ns_dtype", options.ns_dtype, tuple(NS_DTYPES)),
        ("replicate", options.replicate, ("share", "repeat")),
    ):
        if value not in allowed:
            raise UserError(f"optim.{field}={value!r}: choose one of {', '.join(allowed)}")
    if not options.max_stack_gib > 0:
        raise UserError(
            f"optim.max_stack_gib={options.max_stack_gib}: must be above 0; the default is 2"
        )
    resolve_coefficients(options.ns_coefficients, options.ns_steps)


def plan_with_kernels(
    groups: list[PlannedGroup], options: MuonOptions, device: torch.device
) -> tuple[Plan, list[KernelChoice]]:
    """Plan a step and choose each bucket's kernel.

    Raises:
        UserError: a parameter or a kernel asked for is not possible.
    """
    check_options(options)
    choices: list[KernelChoice] = []

    def choose(shape: tuple[int, int, int]) -> tuple[str, str]:
        choices.append(
            choose_kernel(
                options.kernel, shape=shape, dtype=NS_DTYPES[options.ns_dtype], device=device
            )
        )
        return choices[-1].name, choices[-1].reason

    plan_options = PlanOptions(
        options.ns_dtype, options.replicate, options.max_stack_gib, options.split_gate_up
    )
    return build_plan(groups, plan_options, choose), choices


def check_group(group: dict[str, Any], named: NamedGroup) -> None:
    """Check a param group's hyperparameters and that Muon's members are matrices.

    Raises:
        UserError: naming the hyperparameter or the parameter.
    """
    for key, low, high in (
        ("lr", 0, None),
        ("mu", 0, 1),
        ("beta1", 0, 1),
        ("beta2", 0, 1),
        ("weight_decay", 0, None),
        ("epsilon", 0, None),
    ):
        value = float(group[key])
        if not (value >= low and (high is None or value < high)):
            rule = "a finite number of at least 0" if high is None else "in [0, 1)"
            raise UserError(f"{key}={value}: must be {rule}")
    if group["algorithm"] not in ("muon", "adamw"):
        raise UserError(f"algorithm={group['algorithm']!r}: choose 'muon' or 'adamw'")
    for name, parameter in named.named_parameters:
        if group["algorithm"] == "muon":
            _check_matrix(name, parameter, flatten=group["flatten"])


def _check_matrix(name: str, parameter: Tensor, *, flatten: bool) -> None:
    if parameter.ndim < 2:
        raise UserError(
            f"parameter {name} of shape {list(parameter.shape)} is no matrix: Muon needs two dims "
            "or more; put it in an adamw group"
        )
    shard = local(parameter)
    try:
        shard.view(as_matrices(shard, flatten=flatten).shape)
    except RuntimeError as error:
        raise UserError(
            f"parameter {name} of shape {list(parameter.shape)} and strides {shard.stride()} is no "
            "view of matrices: make it contiguous before building the optimizer"
        ) from error


def check_gradient(name: str, parameter: Tensor) -> None:
    """Check that a gradient can be added to momentum shard by shard.

    Raises:
        UserError: it is sparse, or lies otherwise than its parameter.
    """
    gradient = parameter.grad
    if gradient is None:
        return
    if gradient.is_sparse:
        raise UserError(
            f"the gradient of {name} is sparse: momentum is dense; build its embedding with "
            "sparse=False"
        )
    if not (isinstance(parameter, DTensor) and isinstance(gradient, DTensor)):
        return
    if gradient.placements != parameter.placements:
        raise UserError(
            f"the gradient of {name} has placements {gradient.placements}, the parameter "
            f"{parameter.placements}: redistribute it to the parameter's before the step"
        )
