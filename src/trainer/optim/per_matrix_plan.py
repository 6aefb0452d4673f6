"""The plan of `impl = "per_matrix"`: each parameter gathered on every rank, and its kernel.

Owns the routing that table and `plan.json` show; `per_matrix.py` carries it out. It has no buckets,
since parameters follow one another in their order.
"""

import math
from collections.abc import Callable, Sequence

from trainer.optim.agreement import plan_agreements
from trainer.optim.bucketing import PlannedGroup, PlanOptions, is_gate_up, lr_scale
from trainer.optim.layout import lay_out
from trainer.optim.plan import Plan, Route, make_route
from trainer.optim.spec import ParameterSpec


def plan_per_matrix(
    groups: Sequence[PlannedGroup],
    options: PlanOptions,
    choose_kernel: Callable[[tuple[int, int, int]], tuple[str, str]],
) -> Plan:
    """Plan the step of one rank.

    Args:
        groups: The param groups, in order.
        options: Settings that shape the plan.
        choose_kernel: Returns the kernel of a stack (B, M, N) and why.
    """
    members = [(group, spec) for group in groups for spec in group.parameters]
    specs = [spec for _, spec in members]
    gathered = [spec for group, spec in members if is_orthogonalized(group, spec)]
    return Plan(
        options,
        tuple(_route(group, spec, options, choose_kernel) for group, spec in members),
        buckets=(),
        slots=(),
        agreements=plan_agreements(specs),
        num_gathers=sum(len(gathered_axes(spec)) for spec in gathered),
    )


def is_orthogonalized(group: PlannedGroup, spec: ParameterSpec) -> bool:
    """Tell whether a parameter has matrices that Muon orthogonalizes."""
    return group.algorithm == "muon" and math.prod(spec.shape) > 0


def num_blocks(spec: ParameterSpec, *, split_gate_up: bool) -> int:
    """Return into how many blocks of rows each matrix of a parameter is cut."""
    return 2 if split_gate_up and is_gate_up(spec.name) else 1


def block_shape(group: PlannedGroup, spec: ParameterSpec, blocks: int) -> tuple[int, int, int]:
    """Return the stack (B, M, N) that is orthogonalized at a time."""
    layout = lay_out(spec, flatten=group.flatten)
    num_matrices = math.prod(spec.shape) // (layout.rows * layout.cols)
    return num_matrices, layout.rows // blocks, layout.cols


def gathered_axes(spec: ParameterSpec) -> list[tuple[str, int]]:
    """Return name and size of each mesh axis over which a parameter is gathered."""
    if spec.mesh is None:
        return []
    axes = zip(spec.mesh.axes, spec.mesh.sizes, spec.placements, strict=True)
    return [
        (axis, size) for axis, size, placement in axes if placement.dim is not None and size > 1
    ]


def _route(
    group: PlannedGroup,
    spec: ParameterSpec,
    options: PlanOptions,
    choose_kernel: Callable[[tuple[int, int, int]], tuple[str, str]],
) -> Route:
    if not is_orthogonalized(group, spec):
        return make_route(group, spec)
    blocks = num_blocks(spec, split_gate_up=options.split_gate_up)
    shape = block_shape(group, spec, blocks)
    axes = [axis for axis, _ in gathered_axes(spec)]
    layout = f"gathered over {' x '.join(axes)}" if axes else "whole"
    scale = lr_scale(*shape[1:], group.adjust_lr)
    return make_route(group, spec, scale, layout, choose_kernel(shape))
