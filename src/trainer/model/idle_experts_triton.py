# pyright: reportMissingImports=false, reportIndexIssue=false
"""Zeros for idle experts in one small launch, for GPUs.

Owns the Triton form of `experts.zero_idle_`, which imports it only where it can run. A program
whose expert has rows reads two numbers and ends, so that almost nothing is read or written.
"""

import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096
"""Elements that a program writes at a time."""

_PROGRAMS_PER_EXPERT = 8


@triton.jit
def _zero_kernel(
    gradient_ptr, offsets_ptr, num_elements, NUM_PROGRAMS: tl.constexpr, TILE: tl.constexpr
):
    expert = tl.program_id(0)
    stop = tl.load(offsets_ptr + expert)
    start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    if start == stop:
        zeros = tl.zeros((TILE,), gradient_ptr.dtype.element_ty)
        first_ptr = gradient_ptr + expert.to(tl.int64) * num_elements
        for tile in range(tl.program_id(1), tl.cdiv(num_elements, TILE), NUM_PROGRAMS):
            places = tile * TILE + tl.arange(0, TILE)
            tl.store(first_ptr + places, zeros, mask=places < num_elements)


def zero_idle_(gradient_EMN: Tensor, offsets_E: Tensor) -> None:
    """Write zeros to the matrices of experts without a row.

    Args:
        gradient_EMN: Contiguous, any dtype, on a GPU.
        offsets_E: int32, the end of each expert's rows.
    """
    _zero_kernel[(len(gradient_EMN), _PROGRAMS_PER_EXPERT)](
        gradient_EMN,
        offsets_E,
        gradient_EMN[0].numel(),
        NUM_PROGRAMS=_PROGRAMS_PER_EXPERT,
        TILE=_TILE,
    )
