"""A table of where matrices lie, so that one kernel visits those of a hundred parameters.

Owns the table and the test whether a chunk's tensors fit one. What walks it is passes_triton.py,
imported here only where it can run; passes.py does the same work tensor by tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Literal, Self

import torch
from torch import Tensor

from trainer.optim.wire import TAIL

_ALIGNMENT = 16
"""Bytes; a load of four fp32."""


@dataclass(frozen=True)
class MatrixTable:
    """Addresses of matrices of one shape, on the device.

    Attributes:
        addresses_B4: int64, columns as `passes_triton.COLUMNS`.
        num_elements: Of each matrix.
        kernels: passes_triton.
    """

    addresses_B4: Tensor
    num_elements: int
    kernels: ModuleType

    @classmethod
    def of(
        cls,
        gradients: Sequence[Tensor | None],
        momenta: Sequence[Tensor],
        weights: Sequence[Tensor],
        gates: Sequence[Tensor | None],
    ) -> Self | None:
        """Return the table of consecutive matrices, or None where tensors must go one by one.

        The tensors must outlive the kernels that walk the table.

        Args:
            gradients: [B, rows, cols] each; None counts as zeros.
            momenta: Of the same shapes.
            weights: Of the same shapes.
            gates: For each, a 0-d bool on the device; None: open.
        """
        kernels = _find_kernels(momenta[0].device.type) if momenta else None
        present = [g for g in gradients if g is not None]
        if kernels is None or not all(map(_fits, (*present, *momenta, *weights))):
            return None
        columns = zip(gradients, momenta, weights, gates, strict=True)
        lines = torch.cat([_lines(*tensors) for tensors in columns])
        if bool((lines[:, :3] % _ALIGNMENT).any()):
            return None
        device = momenta[0].device
        if device.type == "cuda":
            lines = lines.pin_memory().to(device, non_blocking=True)
        return cls(lines, momenta[0][0].numel(), kernels)

    def update_momentum_(
        self,
        *,
        mu: float,
        nesterov: bool,
        keep: Literal["squares", "largest"],
        num_programs: int | None = None,
    ) -> Tensor:
        """M <- mu * m + g; return what the next pass needs of each matrix's direction.

        Here and below, `num_programs` is how many multiprocessors a pass takes at most; None: all.
        """
        return self.kernels.launch_momentum(
            self.addresses_B4,
            self.num_elements,
            mu=mu,
            nesterov=nesterov,
            keep=keep,
            num_programs=num_programs,
        )

    def normalized_stack(
        self,
        kept_BP: Tensor,
        matrices: slice,
        shape: tuple[int, int],
        dtype: torch.dtype,
        *,
        mu: float,
        nesterov: bool,
        num_programs: int | None = None,
    ) -> Tensor:
        """Return the directions of some matrices, each of Frobenius norm 1 or zero: [B, M, N]."""
        lines_B4 = self.addresses_B4[matrices]
        stack_BMN = torch.empty(len(lines_B4), *shape, dtype=dtype, device=lines_B4.device)
        self.kernels.launch_normalize(
            lines_B4,
            kept_BP[matrices],
            stack_BMN,
            mu=mu,
            nesterov=nesterov,
            num_programs=num_programs,
        )
        return stack_BMN

    def message(
        self,
        kept_BP: Tensor,
        matrices: slice,
        dtype: torch.dtype,
        *,
        mu: float,
        nesterov: bool,
    ) -> Tensor:
        """Return the directions of some slabs as `wire.pack` does: [B, elements + TAIL]."""
        lines_B4 = self.addresses_B4[matrices]
        width = self.num_elements + TAIL
        message = torch.empty(len(lines_B4), width, dtype=dtype, device=lines_B4.device)
        self.kernels.launch_message(
            lines_B4, kept_BP[matrices], message, TAIL, mu=mu, nesterov=nesterov
        )
        return message

    def apply_(
        self,
        update_BMN: Tensor,
        matrices: slice,
        *,
        decay: float,
        step_size: float,
        num_programs: int | None = None,
    ) -> None:
        """W <- w * (1 - decay) - step_size * O, for contiguous O."""
        self.kernels.launch_update(
            self.addresses_B4[matrices],
            update_BMN,
            decay=decay,
            step_size=step_size,
            num_programs=num_programs,
        )


def _fits(matrices_BMN: Tensor) -> bool:
    """Tell whether matrices are fp32 and each is contiguous; the stride between them is free."""
    _, rows, cols = matrices_BMN.shape
    is_dense = rows * cols > 0 and matrices_BMN.stride()[1:] == (cols, 1)
    return is_dense and matrices_BMN.dtype == torch.float32


def _lines(
    gradient: Tensor | None, momentum: Tensor, weight: Tensor, gate: Tensor | None
) -> Tensor:
    """Return a parameter's lines of the table, on the host."""
    count = len(momentum)
    columns = [_addresses(tensor, count) for tensor in (gradient, momentum, weight)]
    open_or_not = torch.full((count,), 0 if gate is None else gate.data_ptr(), dtype=torch.int64)
    return torch.stack([*columns, open_or_not], dim=1)


def _addresses(matrices_BMN: Tensor | None, count: int) -> Tensor:
    if matrices_BMN is None:
        return torch.zeros(count, dtype=torch.int64)
    stride = matrices_BMN.stride(0) * matrices_BMN.itemsize
    return matrices_BMN.data_ptr() + stride * torch.arange(count)


@lru_cache
def _find_kernels(device_type: str) -> ModuleType | None:
    """Import the Triton kernels; None on a CPU, or where there is no Triton."""
    if device_type != "cuda":
        return None
    try:
        from trainer.optim.kernels import passes_triton
    except ImportError:
        return None
    return passes_triton
