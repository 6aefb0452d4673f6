"""Frobenius normalization of each matrix of a batch, without overflow or underflow.

Owns the scaling that precedes the iteration, in torch; normalize_triton.py does the same on GPUs.
The iteration (iteration.py) takes it from there.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor


def normalized_copy(X_BMN: Tensor, dtype: torch.dtype) -> Tensor:
    """Return each matrix divided by its Frobenius norm, in `dtype`; a zero matrix stays zero.

    Sums of squares of raw entries overflow fp32 at 1e20 and vanish at 1e-25. So in torch a power
    of two first brings the largest entry of each matrix to [0.5, 1), which is exact, and squares
    are summed in fp32; the Triton kernels sum in fp64. Nothing is added to the norm, so that c·X
    gives the result of X for every power of two c, bit for bit. A matrix with a nan comes out as
    nan.

    Args:
        X_BMN: any float dtype and strides; not written.
        dtype: of the result.

    Returns:
        [B, M, N], freshly allocated, dense, with the contiguous dim of `X_BMN` contiguous.
    """
    fused = _find_fused() if _is_fusible(X_BMN, dtype) else None
    if fused is not None:
        out_BMN = _empty_in_layout_of(X_BMN, dtype)
        fused(out_BMN, X_BMN)
        return out_BMN
    return _normalized_by_torch(X_BMN, dtype)


def _normalized_by_torch(X_BMN: Tensor, dtype: torch.dtype) -> Tensor:
    scale_B11, accumulate = _power_of_two_scale(X_BMN), _accumulation_dtype(X_BMN.dtype, dtype)
    # Between equal 16-bit dtypes the scaled values are exact as they are: no fp32 temporary.
    scaled_BMN = _empty_in_layout_of(X_BMN, dtype if X_BMN.dtype == dtype else accumulate)
    torch.mul(X_BMN, scale_B11, out=scaled_BMN)
    # Row by row: one running fp32 sum over a whole matrix is off by 1e-4 at 2048x2048 on a CPU.
    norm_BM1 = torch.linalg.vector_norm(scaled_BMN, dim=-1, keepdim=True, dtype=accumulate)
    norm_B11 = torch.linalg.vector_norm(norm_BM1, dim=-2, keepdim=True)
    inverse_B11 = torch.where(norm_B11 == 0, 1.0, norm_B11).reciprocal()
    if scaled_BMN.dtype == dtype:
        return scaled_BMN.mul_(inverse_B11)
    out_BMN = _empty_in_layout_of(X_BMN, dtype)
    return torch.mul(scaled_BMN, inverse_B11, out=out_BMN)


def _is_fusible(X_BMN: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether the Triton kernels take it: on a GPU, no fp64, every matrix dense."""
    _, M, N = X_BMN.shape
    is_dense = X_BMN.stride()[1:] in ((N, 1), (1, M))
    return X_BMN.device.type == "cuda" and is_dense and torch.float64 not in (X_BMN.dtype, dtype)


@lru_cache
def _find_fused() -> Callable[[Tensor, Tensor], None] | None:
    """Import the Triton kernels, or return None where there is no Triton."""
    try:
        from trainer.optim.kernels.normalize_triton import normalize_into_
    except ImportError:
        return None
    return normalize_into_


def _power_of_two_scale(X_BMN: Tensor) -> Tensor:
    """Return [B, 1, 1], the power of two that brings each largest entry to [0.5, 1).

    Assembled from its exponent bits, since a device's `pow` need not be exact; normal in its dtype,
    so that scaling by it is exact, which keeps the very largest entries under 4 and leaves
    subnormal ones smaller.
    """
    largest_B11 = torch.linalg.vector_norm(X_BMN, ord=float("inf"), dim=(-2, -1), keepdim=True)
    is_double = X_BMN.dtype == torch.float64
    wide, bits = (torch.float64, torch.int64) if is_double else (torch.float32, torch.int32)
    bias, num_mantissa_bits = (1023, 52) if is_double else (127, 23)
    exponent_B11 = torch.frexp(largest_B11.to(wide)).exponent.to(bits)
    exponent_B11 = exponent_B11.clamp(1 - bias, bias - 1)
    return torch.bitwise_left_shift(bias - exponent_B11, num_mantissa_bits).view(wide)


def _accumulation_dtype(source: torch.dtype, target: torch.dtype) -> torch.dtype:
    return torch.float64 if torch.float64 in (source, target) else torch.float32


def _empty_in_layout_of(X_BMN: Tensor, dtype: torch.dtype) -> Tensor:
    num_matrices, M, N = X_BMN.shape
    if X_BMN.stride(-1) != 1 and X_BMN.stride(-2) == 1:
        return X_BMN.new_empty(num_matrices, N, M, dtype=dtype).mT
    return X_BMN.new_empty(num_matrices, M, N, dtype=dtype)
