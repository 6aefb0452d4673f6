"""Muon's settings that never enter the state, and the plan they make.

Owns `MuonOptions`, their checks and the choice of each bucket's kernel. What a param group may say
is `checks.py`'s, the plan itself `plan.py`'s.
"""

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal

import torch

from trainer.errors import UserError
from trainer.optim.bucketing import is_gate_up
from trainer.optim.coefficients import CoefficientTable, resolve_coefficients
from trainer.optim.kernels.select import NAMES, KernelChoice, choose_kernel
from trainer.optim.per_matrix_plan import plan_per_matrix
from trainer.optim.pipeline import NS_DTYPES
from trainer.optim.plan import Plan, PlannedGroup, PlanOptions, build_plan


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
        ("kernel", options.kernel, NAMES),
        ("ns_dtype", options.ns_dtype, tuple(NS_DTYPES)),
        ("replicate", options.replicate, ("share", "repeat")),
    ):
        if value not in allowed:
            raise UserError(f"optim.{field}={value!r}: choose one of {', '.join(allowed)}")
    gib, interval = options.max_stack_gib, options.stats_interval
    if isinstance(gib, bool) or not isinstance(gib, Real) or not 0 < gib < math.inf:
        raise UserError(
            f"optim.max_stack_gib={gib!r}: must be a finite number above 0; the default is 2"
        )
    if isinstance(interval, bool) or not isinstance(interval, Integral) or interval < 0:
        raise UserError(
            f"optim.stats_interval={interval!r}: must be a whole number of steps, 0 for never"
        )
    if not isinstance(options.split_gate_up, bool):
        raise UserError(f"optim.split_gate_up={options.split_gate_up!r}: must be True or False")
    resolve_coefficients(options.ns_coefficients, options.ns_steps)


def plan_with_kernels(
    groups: list[PlannedGroup], options: MuonOptions, device: torch.device
) -> tuple[Plan, list[KernelChoice]]:
    """Plan a step and choose each bucket's kernel; `impl = "per_matrix"` has no buckets.

    Raises:
        UserError: a parameter or a kernel asked for is not possible.
    """
    check_options(options)
    _check_split(groups, options)
    choices: list[KernelChoice] = []

    def choose(shape: tuple[int, int, int]) -> tuple[str, str]:
        choices.append(choose_kernel_of(options, device, shape))
        return choices[-1].name, choices[-1].reason

    plan_options = PlanOptions(
        options.ns_dtype, options.replicate, options.max_stack_gib, options.split_gate_up
    )
    plan = build_plan(groups, plan_options, choose)
    if options.impl == "per_matrix":
        # What cannot be orthogonalized as it lies is refused under either.
        return plan_per_matrix(groups, plan_options, choose), []
    return plan, choices


def choose_kernel_of(
    options: MuonOptions, device: torch.device, shape: tuple[int, int, int]
) -> KernelChoice:
    """Return the kernel of a stack (B, M, N) on a device.

    Raises:
        UserError: one asked for by name cannot run.
    """
    dtype = NS_DTYPES[options.ns_dtype]
    return choose_kernel(options.kernel, shape=shape, dtype=dtype, device=device)


def _check_split(groups: list[PlannedGroup], options: MuonOptions) -> None:
    names = [s.name for g in groups if g.algorithm == "muon" for s in g.parameters]
    if options.split_gate_up and not any(map(is_gate_up, names)):
        raise UserError(
            "optim.split_gate_up=true: no parameter is a fused gate and up projection of experts "
            "(a name that ends in experts.gate_up_proj); set optim.split_gate_up=false"
        )
