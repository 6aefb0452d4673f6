# pyright: reportMissingImports=false, reportIndexIssue=false
"""Frobenius normalization on a GPU in two passes: read, then read and write.

Owns the Triton form of `normalize.normalized_copy`, which imports this module only on a GPU and
only where Triton is there. In torch alone the same takes six passes, a twentieth of the time of
the whole iteration at 16x1536x2048.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.optim.kernels.launches import record_launch

_BLOCK = 2048
_MIN_BLOCKS = 32
"""Blocks that a program reads: 48 programs for a matrix of 1536x2048."""

_MAX_CHUNKS = 1024
"""Partial sums that a program of the second pass adds up."""


@triton.jit
def _sum_squares_kernel(
    x_ptr,
    partial_ptr,
    num_elements,
    matrix_stride,
    num_chunks,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write each chunk's sum of squares, in fp64, where squares of any fp32 are normal numbers."""
    program = tl.program_id(0)
    matrix, chunk_index = program // num_chunks, program % num_chunks
    x_ptr += matrix.to(tl.int64) * matrix_stride
    first = chunk_index.to(tl.int64) * (NUM_BLOCKS * BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for block in range(NUM_BLOCKS):
        offsets = first + block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offsets, mask=offsets < num_elements, other=0.0).to(tl.float64)
        total += x * x
    tl.store(partial_ptr + program, tl.sum(total, axis=0))


@triton.jit
def _scale_kernel(
    x_ptr,
    y_ptr,
    partial_ptr,
    num_elements,
    matrix_stride,
    num_chunks,
    NUM_BLOCKS: tl.constexpr,
    NUM_PARTIALS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Divide a chunk by the root of the matrix's sum of squares; a sum of zero divides by one."""
    program = tl.program_id(0)
    matrix, chunk_index = program // num_chunks, program % num_chunks
    parts = tl.arange(0, NUM_PARTIALS)
    partial_ptr += matrix * num_chunks
    total = tl.sum(tl.load(partial_ptr + parts, mask=parts < num_chunks, other=0.0), axis=0)
    inverse = 1.0 / tl.sqrt(tl.where(total == 0.0, 1.0, total))
    x_ptr += matrix.to(tl.int64) * matrix_stride
    y_ptr += matrix.to(tl.int64) * num_elements
    first = chunk_index.to(tl.int64) * (NUM_BLOCKS * BLOCK)
    for block in range(NUM_BLOCKS):
        offsets = first + block * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < num_elements
        x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float64)
        y = (x * inverse).to(tl.float32).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + offsets, y, mask=inside)


def normalize_into_(out_BMN: Tensor, X_BMN: Tensor) -> None:
    """Write each matrix divided by its Frobenius norm; a zero matrix stays zero.

    The order of the sums depends on the shape of a matrix alone, so that neither its neighbours nor
    their number change a bit of it; a power of two in X changes none either.

    Args:
        out_BMN: [B, M, N], float32, bfloat16 or float16, contiguous or the transpose of that.
        X_BMN: [B, M, N] of any of these dtypes, each matrix dense in the layout of `out_BMN`; the
            stride between matrices is free.
    """
    record_launch("triton.normalize")
    num_matrices, M, N = X_BMN.shape
    num_elements = M * N
    num_blocks = max(_MIN_BLOCKS, triton.cdiv(num_elements, _MAX_CHUNKS * _BLOCK))
    num_chunks = triton.cdiv(num_elements, num_blocks * _BLOCK)
    partial = X_BMN.new_empty(num_matrices * num_chunks, dtype=torch.float64)
    grid = (num_matrices * num_chunks,)
    sizes = (num_elements, X_BMN.stride(0), num_chunks)
    blocks = {"NUM_BLOCKS": num_blocks, "BLOCK": _BLOCK, "num_warps": 8}
    _sum_squares_kernel[grid](X_BMN, partial, *sizes, **blocks)
    _scale_kernel[grid](
        X_BMN,
        out_BMN,
        partial,
        *sizes,
        NUM_PARTIALS=triton.next_power_of_2(num_chunks),
        **blocks,
    )
