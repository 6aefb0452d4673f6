"""What a step of `impl = "per_matrix"` costs on its rank: every rank does all of the work.

Owns the counting, after `per_matrix.py`. The stacked step's price is in `pricing.py`.
"""

import math
from collections.abc import Callable, Sequence

from trainer.optim.agreement import plan_agreements
from trainer.optim.bucket import BYTES
from trainer.optim.bucketing import PlannedGroup
from trainer.optim.coefficients import CoefficientTable
from trainer.optim.kernels.select import KernelChoice
from trainer.optim.layout import local_shape
from trainer.optim.newton_schulz import newton_schulz_flops, newton_schulz_workspace_bytes
from trainer.optim.per_matrix_plan import (
    block_shape,
    gathered_axes,
    is_orthogonalized,
    num_blocks,
)
from trainer.optim.pipeline import NS_DTYPES
from trainer.optim.pricing import Price, state_bytes
from trainer.optim.spec import ParameterSpec


def price_per_matrix(
    groups: Sequence[PlannedGroup],
    choose_kernel: Callable[[tuple[int, int, int]], KernelChoice],
    *,
    ns_dtype: str,
    steps: int,
    coefficients: CoefficientTable,
    split_gate_up: bool,
) -> Price:
    """Price a step.

    Args:
        groups: The param groups.
        choose_kernel: From a stack's shape (B, M, N).
        ns_dtype: Of the iteration.
        steps: `ns_steps`.
        coefficients: `ns_coefficients`.
        split_gate_up: Whether gate and up are orthogonalized each on their own.
    """
    flops, temporary, moved = 0, 0, 0
    sent: dict[str, int] = {}
    names: dict[str, str] = {}
    specs = [spec for group in groups for spec in group.parameters]
    num_collectives = len(plan_agreements(specs))
    for group in groups:
        for spec in group.parameters:
            if not is_orthogonalized(group, spec):
                continue
            blocks = num_blocks(spec, split_gate_up=split_gate_up)
            shape = block_shape(group, spec, blocks)
            kernel = choose_kernel(shape)
            names[f"{shape[1]}x{shape[2]}"] = f"{kernel.name} ({kernel.reason})"
            settings = {
                "steps": steps,
                "coefficients": coefficients,
                "dtype": NS_DTYPES[ns_dtype],
                "kernel": kernel,
            }
            flops += blocks * newton_schulz_flops(shape, **settings)
            work = newton_schulz_workspace_bytes(
                shape, **settings, input_dtype=NS_DTYPES["float32"]
            )
            temporary = max(temporary, _temporaries(spec, work, blocks, ns_dtype))
            moved += math.prod(spec.shape) * (4 * BYTES["float32"] + 2 * BYTES[ns_dtype])
            for axis, count in _reduced_bytes(spec).items():
                sent[axis] = sent.get(axis, 0) + count
                num_collectives += 1
    return Price(flops, sent, num_collectives, state_bytes(groups), temporary, moved, names)


def _temporaries(spec: ParameterSpec, work: int, blocks: int, ns_dtype: str) -> int:
    """Return the most while one parameter is updated.

    The whole in fp32 throughout; beside it first the iteration, with blocks that are done; then
    the result, its blocks joined, this rank's part of it, and the new weight.
    """
    numel, local = math.prod(spec.shape), math.prod(local_shape(spec))
    size = BYTES[ns_dtype]
    iterating = work + size * numel * (blocks - 1) // blocks
    applying = 2 * size * numel + local * (size + BYTES[spec.dtype])
    return BYTES["float32"] * numel + max(iterating, applying)


def _reduced_bytes(spec: ParameterSpec) -> dict[str, int]:
    """Return what this rank sends to gather a parameter by all-reduces, by axis."""
    whole = BYTES["float32"] * math.prod(spec.shape)
    return {axis: 2 * whole * (size - 1) // size for axis, size in gathered_axes(spec)}
