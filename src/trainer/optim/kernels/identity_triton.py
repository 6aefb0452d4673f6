# pyright: reportMissingImports=false, reportIndexIssue=false
"""Adding a multiple of the identity on a GPU: one launch, each element read and written once.

Owns the Triton form of `identity.add_identity`, which imports this module only on a GPU and only
where Triton is there. In torch the diagonal takes three launches beside the copy.
"""

import triton
import triton.language as tl
from torch import Tensor

from trainer.optim.kernels.launches import record_launch

_ROWS = 32
_COLUMNS = 256
_DIAGONAL = 1024


@triton.jit
def _shift(z, a):
    return (z.to(tl.float32) + a).to(z.dtype)


@triton.jit
def _copy_kernel(z_ptr, out_ptr, a, M, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write a tile of Z + a·I."""
    matrix = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    offsets = matrix * M * M + rows * M + columns
    inside = (rows < M) & (columns < M)
    z = tl.load(z_ptr + offsets, mask=inside, other=0.0)
    tl.store(out_ptr + offsets, tl.where(rows == columns, _shift(z, a), z), mask=inside)


@triton.jit
def _diagonal_kernel(z_ptr, a, M, BLOCK: tl.constexpr):
    """Add to a part of one matrix's diagonal, in place."""
    matrix = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offsets = matrix * M * M + places * (M + 1)
    inside = places < M
    z = tl.load(z_ptr + offsets, mask=inside, other=0.0)
    tl.store(z_ptr + offsets, _shift(z, a), mask=inside)


def launch_add_identity(Z_BMM: Tensor, a: float, out_BMM: Tensor) -> None:
    """Write Z + a·I, summed in fp32 and rounded once.

    Args:
        Z_BMM: [B, M, M], contiguous, float32, bfloat16 or float16.
        a: as it says.
        out_BMM: as Z, and may be it.
    """
    record_launch("triton.add_identity")
    num_matrices, M, _ = Z_BMM.shape
    if out_BMM is Z_BMM:
        _diagonal_kernel[(num_matrices, triton.cdiv(M, _DIAGONAL))](Z_BMM, a, M, BLOCK=_DIAGONAL)
        return
    grid = (num_matrices, triton.cdiv(M, _ROWS), triton.cdiv(M, _COLUMNS))
    _copy_kernel[grid](Z_BMM, out_BMM, a, M, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=8)
