"""fp32 means IEEE: TF32 and bf16 shortcuts of torch's matmuls are off while Newton-Schulz runs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def ieee_matmul(dtype: torch.dtype) -> Iterator[None]:
    """Run float32 products in IEEE arithmetic, whatever the process-wide setting; restore it after.

    Other dtypes have no such setting, and nothing is touched for them. Reads and writes torch's
    per-backend `fp32_precision`, which also holds what `torch.set_float32_matmul_precision` set.
    """
    if dtype != torch.float32:
        yield
        return
    mkldnn = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    backends = (torch.backends.cuda.matmul, mkldnn)
    before = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision
