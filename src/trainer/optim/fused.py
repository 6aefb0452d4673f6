"""What torch's fused optimizer kernels ask of their arguments: memory in step, and a flag.

Owns the forms only. `adamw.py` and `torch_optimizers.py` call the kernels; the gate on the host is
`gate.py`'s.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def in_step(tensors: Sequence[Tensor]) -> Generator[list[Tensor]]:
    """Yield tensors that kernels can walk side by side; write back what they change.

    The kernels go from address to address without a look at strides: of a transposed weight and
    its row-major gradient they pair the wrong elements. A tensor that is contiguous is yielded
    itself, any other as a copy.

    Args:
        tensors: Local, of any strides.
    """
    walked = [tensor.contiguous() for tensor in tensors]
    yield walked
    for tensor, copy in zip(tensors, walked, strict=True):
        if copy is not tensor:
            tensor.copy_(copy)


def found_inf(gate: Tensor | None) -> Tensor | None:
    """Return the flag as the kernels take it: float32, 1 where the step is skipped."""
    return None if gate is None else gate.logical_not().to(torch.float32)
