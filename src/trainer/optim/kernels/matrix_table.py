"""A table of where matrices lie, so that one kernel visits those of a hundred parameters.

Owns the table, what of it is the same at every step (`TableLayout`), and the test whether tensors
fit one. What walks it is passes_triton.py, imported here only where it can run; passes.py does the
same work tensor by tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from trainer.optim.wire import TAIL

_ALIGNMENT = 16
"""Bytes; a load of four fp32."""


@dataclass(frozen=True)
class Run:
    """Consecutive matrices of one parameter's local shard, or the same rows of each.

    Attributes:
        parameter: Index of the parameter.
        first: First matrix.
        count: Matrices.
        stride: Elements from one to the next.
        offset: Elements before the rows, in each.
        num_elements: Of the rows.
    """

    parameter: int
    first: int
    count: int
    stride: int
    offset: int
    num_elements: int


class TableLayout:
    """Where a chunk's matrices lie within their parameters: all that no step changes.

    Args:
        runs: Of one `num_elements`; at least one.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        counts = torch.tensor([run.count for run in runs], dtype=torch.int64)
        offsets = [(run.first + torch.arange(run.count)) * run.stride + run.offset for run in runs]
        self.parameters = tuple(run.parameter for run in runs)
        """Index of each run's parameter."""
        self._num_elements = runs[0].num_elements
        self._run_B = torch.arange(len(runs)).repeat_interleave(counts)
        self._offset_B1 = 4 * torch.cat(offsets)[:, None]
        self._latest: tuple[list[list[int]], MatrixTable | None] | None = None

    def table(
        self,
        gradients: Sequence[Tensor | None],
        momenta: Sequence[Tensor],
        weights: Sequence[Tensor],
        gates: Sequence[Tensor | None],
    ) -> "MatrixTable | None":
        """Return the table; None where the tensors must be passed over one by one, or are empty.

        The tensors must outlive the kernels that walk the table. Where all lie as at the last call,
        that call's table is returned: nothing is copied to the device.

        Args:
            gradients: Local shard of each run's; None counts as zeros.
            momenta: As many, of the same shapes.
            weights: As many, of the same shapes.
            gates: For each, a 0-d bool on the device; None: open.
        """
        kernels = find_kernels(weights[0].device.type)
        if kernels is None or self._num_elements == 0:
            return None
        columns = list(zip(gradients, momenta, weights, strict=True))
        if not all(t is None or _fits(t) for ts in columns for t in ts):
            return None
        bases = [
            [*(0 if t is None else t.data_ptr() for t in tensors), _address_of(gate)]
            for tensors, gate in zip(columns, gates, strict=True)
        ]
        if self._latest is None or self._latest[0] != bases:
            self._latest = bases, self._make(bases, weights[0].device, kernels)
        return self._latest[1]

    def _make(
        self, bases: list[list[int]], device: torch.device, kernels: ModuleType
    ) -> "MatrixTable | None":
        """Return the table of tensors that begin at `bases`; None where one is misaligned."""
        lines_B4 = torch.tensor(bases, dtype=torch.int64)[self._run_B]
        lines_B4[:, :3] += self._offset_B1 * (lines_B4[:, :3] != 0)
        if bool((lines_B4[:, :3] % _ALIGNMENT).any()):
            return None
        if device.type == "cuda":
            lines_B4 = lines_B4.pin_memory().to(device, non_blocking=True)
        return MatrixTable(lines_B4, self._num_elements, kernels)


@dataclass(frozen=True)
class MatrixTable:
    """Addresses of a chunk's matrices, on the device.

    Attributes:
        addresses_B4: int64, columns as `passes_triton.COLUMNS`.
        num_elements: Of each matrix.
        kernels: passes_triton.
    """

    addresses_B4: Tensor
    num_elements: int
    kernels: ModuleType

    def update_momentum_(
        self,
        *,
        mu: float,
        nesterov: bool,
        keep: Literal["squares", "largest"],
    ) -> Tensor:
        """M <- mu * m + g; return what the next pass needs of each matrix's direction."""
        return self.kernels.launch_momentum(
            self.addresses_B4,
            self.num_elements,
            mu=mu,
            nesterov=nesterov,
            keep=keep,
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
            lines_B4,
            kept_BP[matrices],
            message,
            TAIL,
            mu=mu,
            nesterov=nesterov,
        )
        return message

    def apply_(
        self,
        update_BMN: Tensor,
        matrices: slice,
        *,
        decay: float,
        step_size: float,
    ) -> None:
        """W <- w * (1 - decay) - step_size * O, for contiguous O."""
        self.kernels.launch_update(
            self.addresses_B4[matrices],
            update_BMN,
            decay=decay,
            step_size=step_size,
        )


def _fits(shard: Tensor) -> bool:
    """Tell whether a shard is what the kernels read: fp32, its matrices one after the other."""
    return shard.dtype == torch.float32 and shard.is_contiguous()


def _address_of(gate: Tensor | None) -> int:
    return 0 if gate is None else gate.data_ptr()


@lru_cache
def find_kernels(device_type: str) -> ModuleType | None:
    """Import the Triton kernels; None on a CPU, or where there is no Triton."""
    if device_type != "cuda":
        return None
    try:
        from trainer.optim.kernels import passes_triton
    except ImportError:
        return None
    return passes_triton
