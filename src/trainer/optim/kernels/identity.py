"""Adding a multiple of the identity to each matrix of a batch, rounded once.

Owns `add_identity`, in torch; identity_triton.py does the same on GPUs in one launch.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor


def add_identity(Z_BMM: Tensor, a: float, out_BMM: Tensor) -> None:
    """Write Z + a·I, rounded once; in place it touches the diagonal alone."""
    fused = _find_fused() if _is_fusible(Z_BMM, out_BMM) else None
    if fused is not None:
        fused(Z_BMM, a, out_BMM)
        return
    # On a CPU, adding a Python number to a 16-bit tensor rounds the number first.
    wide = torch.promote_types(Z_BMM.dtype, torch.float32)
    shifted_BM = Z_BMM.diagonal(dim1=-2, dim2=-1).to(wide) + a
    if out_BMM is not Z_BMM:
        out_BMM.copy_(Z_BMM)
    out_BMM.diagonal(dim1=-2, dim2=-1).copy_(shifted_BM)


def _is_fusible(Z_BMM: Tensor, out_BMM: Tensor) -> bool:
    """Tell whether the Triton kernel takes them: on a GPU, contiguous, no fp64."""
    are_contiguous = Z_BMM.is_contiguous() and out_BMM.is_contiguous()
    return Z_BMM.device.type == "cuda" and are_contiguous and Z_BMM.dtype != torch.float64


@lru_cache
def _find_fused() -> Callable[[Tensor, float, Tensor], None] | None:
    """Import the Triton kernel, or return None where there is no Triton."""
    try:
        from trainer.optim.kernels.identity_triton import launch_add_identity
    except ImportError:
        return None
    return launch_add_identity
