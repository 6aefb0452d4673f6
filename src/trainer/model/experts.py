"""The expert networks: stacks of gate, up and down projections over rows sorted by expert.

Owns the parameters and both ways to multiply by them. Does not own how rows come to be sorted
(`trainer.parallel.dispatch`) nor the router (`router.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.errors import UserError
from trainer.parallel.dispatch import combine_tokens, dispatch_tokens, plan_dispatch

_GROUPED_MM_STRIDE_BYTES = 16
"""torch's grouped_mm takes strides in multiples of this."""


@dataclass(frozen=True)
class ExpertsImpl:
    """How the experts multiply, and why."""

    name: Literal["grouped_mm", "loop"]
    reason: str


def choose_experts_impl(
    requested: Literal["auto", "grouped_mm", "loop"],
    *,
    dtype: torch.dtype,
    hidden_size: int,
    moe_intermediate_size: int,
    device_type: str,
) -> ExpertsImpl:
    """Resolve `model.experts` once, at construction.

    Raises:
        UserError: `grouped_mm` is asked for and cannot run these shapes in this dtype.
    """
    if requested == "loop":
        return ExpertsImpl("loop", "asked for")
    obstacle = _grouped_mm_obstacle(dtype, hidden_size, moe_intermediate_size, device_type)
    if obstacle is None:
        reason = "asked for" if requested == "grouped_mm" else "dtype and shapes allow it"
        return ExpertsImpl("grouped_mm", reason)
    if requested == "grouped_mm":
        raise UserError(
            f"model.experts='grouped_mm' cannot run here: {obstacle}; "
            "use model.experts = 'auto' or 'loop'"
        )
    return ExpertsImpl("loop", f"grouped_mm cannot run: {obstacle}")


def _grouped_mm_obstacle(
    dtype: torch.dtype, hidden_size: int, moe_intermediate_size: int, device_type: str
) -> str | None:
    if dtype not in (torch.float32, torch.bfloat16):
        return f"it takes float32 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    sizes = {"hidden_size": hidden_size, "moe_intermediate_size": moe_intermediate_size}
    for name, size in sizes.items():
        if size * dtype.itemsize % _GROUPED_MM_STRIDE_BYTES:
            multiple = _GROUPED_MM_STRIDE_BYTES // dtype.itemsize
            return f"{name}={size} is not a multiple of {multiple} (rows of 16 bytes)"
    if device_type == "cuda" and torch.cuda.get_device_capability() < (8, 0):
        return "it needs a GPU of compute capability 8.0 or later"
    return None


class Experts(nn.Module):
    """E gated feed-forward networks, names and shapes those of transformers' Qwen3MoeExperts.

    Parameters may become DTensors split over the `ep` axis on dim 0 (after `set_ep`); each rank
    then computes its local experts for every rank's tokens. Experts without a token get zero
    gradients, never None: FSDP reduces a unit's gradients on all ranks or on none.

    Args:
        hidden_size: D.
        moe_intermediate_size: F.
        num_experts: E, over all ranks.
        impl: `grouped_mm` or `loop` (the reference), from `choose_experts_impl`.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        moe_intermediate_size: int,
        num_experts: int,
        impl: Literal["grouped_mm", "loop"],
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.impl: Literal["grouped_mm", "loop"] = impl
        self.gate_up_proj = nn.Parameter(
            torch.empty(num_experts, 2 * moe_intermediate_size, hidden_size)
        )
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, moe_intermediate_size))
        self._ep_group: dist.ProcessGroup | None = None

    def set_ep(self, group: dist.ProcessGroup) -> None:
        """Split the experts over `group`; the caller shards the parameters on dim 0 alike."""
        assert self.num_experts % dist.get_world_size(group) == 0, "setup.check_ep refuses it"
        self._ep_group = group

    def forward(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return `[T, D]`: for each token the weighted sum of its experts' outputs.

        Args:
            x_TD: `[T, D]`, this rank's tokens.
            experts_TK: `[T, K]`, int64.
            weights_TK: `[T, K]`, in the dtype of `x_TD`.

        Collective: `ep` axis, three all-to-all (counts, tokens, results); every rank calls.
        """
        plan = plan_dispatch(experts_TK, self.num_experts, self._ep_group)
        rows_RD = dispatch_tokens(x_TD, plan)
        gate_up_RM = self._linear(rows_RD, self.gate_up_proj, plan.offsets_E)  # M = 2F
        rows_RD = self._linear(swiglu(gate_up_RM), self.down_proj, plan.offsets_E)
        return combine_tokens(rows_RD, weights_TK, plan)

    def _linear(self, rows_RN: Tensor, weight_EMN: Tensor, offsets_E: Tensor) -> Tensor:
        weight_EMN = weight_EMN.to_local() if isinstance(weight_EMN, DTensor) else weight_EMN
        assert weight_EMN.shape[0] == offsets_E.shape[0], (weight_EMN.shape, offsets_E.shape)
        match self.impl:
            case "grouped_mm":
                return grouped_linear(rows_RN, weight_EMN, offsets_E)
            case "loop":
                return loop_linear(rows_RN, weight_EMN, offsets_E)


def loop_linear(rows_RN: Tensor, weight_EMN: Tensor, offsets_E: Tensor) -> Tensor:
    """Multiply each expert's rows by its matrix, one expert at a time; waits for the device.

    Args:
        rows_RN: `[R, N]`, sorted by expert.
        weight_EMN: `[local_E, M, N]`.
        offsets_E: int32 `[local_E]`, the end of each expert's rows.

    Returns:
        `[R, M]`.
    """
    ends = offsets_E.tolist()
    counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    # Empty slices take part too, so that an idle expert's gradient is zero and not None.
    pieces = zip(rows_RN.split(counts), weight_EMN.unbind(0), strict=True)
    return torch.cat([nn.functional.linear(rows, weight) for rows, weight in pieces])


def grouped_linear(rows_RN: Tensor, weight_EMN: Tensor, offsets_E: Tensor) -> Tensor:
    """Do what `loop_linear` does in one grouped GEMM, without waiting for the device."""
    return _GroupedLinear.apply(rows_RN, weight_EMN, offsets_E)  # pyright: ignore[reportReturnType]


class _GroupedLinear(torch.autograd.Function):
    """`torch.nn.functional.grouped_mm` with defined results for no rows and for idle experts."""

    @staticmethod
    def forward(ctx: Any, rows_RN: Tensor, weight_EMN: Tensor, offsets_E: Tensor) -> Tensor:
        ctx.save_for_backward(rows_RN, weight_EMN, offsets_E)
        if rows_RN.shape[0] == 0:
            return rows_RN.new_zeros(0, weight_EMN.shape[1])
        return nn.functional.grouped_mm(rows_RN, weight_EMN.transpose(1, 2), offs=offsets_E)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows_RN, weight_EMN, offsets_E = ctx.saved_tensors
        if rows_RN.shape[0] == 0:
            return torch.zeros_like(rows_RN), torch.zeros_like(weight_EMN), None
        grad_RM = grads[0].contiguous()
        needs_rows, needs_weight = ctx.needs_input_grad[:2]
        rows_grad = weight_grad = None
        if needs_rows:
            rows_grad = nn.functional.grouped_mm(grad_RM, weight_EMN, offs=offsets_E)
        if needs_weight:
            weight_grad = nn.functional.grouped_mm(grad_RM.T, rows_RN, offs=offsets_E)
            # A GEMM with no rows may leave its output unwritten, depending on the kernel.
            zero_idle_(weight_grad, offsets_E)
        return rows_grad, weight_grad, None


def zero_idle_(gradient_EMN: Tensor, offsets_E: Tensor) -> None:
    """Write zeros to the matrices of experts without a row.

    Args:
        gradient_EMN: `[local_E, M, N]`.
        offsets_E: int32 `[local_E]`, the end of each expert's rows.
    """
    on_gpu = _find_zero_kernel() if gradient_EMN.is_cuda and gradient_EMN.is_contiguous() else None
    if on_gpu is not None:
        on_gpu(gradient_EMN, offsets_E)
        return
    is_idle_E = offsets_E.diff(prepend=offsets_E.new_zeros(1)) == 0
    gradient_EMN.masked_fill_(is_idle_E.view(-1, 1, 1), 0)


@cache
def _find_zero_kernel() -> Callable[[Tensor, Tensor], None] | None:
    """Import the Triton form, which passes over idle experts alone; None without Triton."""
    try:
        from trainer.model.idle_experts_triton import zero_idle_ as on_gpu
    except ImportError:
        return None
    return on_gpu


def swiglu(gate_up_RM: Tensor) -> Tensor:
    """Return silu(gate) · up, `[R, F]`, of `[R, 2F]` rows: gate first, then up.

    Bitwise as the two operations, values and gradients, but keeps only its input for the
    backward, where they would keep silu(gate) as well.
    """
    return _SwiGLU.apply(gate_up_RM)  # pyright: ignore[reportReturnType]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_RM: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_RM)
        gate_RF, up_RF = gate_up_RM.chunk(2, dim=-1)
        return nn.functional.silu(gate_RF).mul_(up_RF)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up_RM,) = ctx.saved_tensors
        gate_RF, up_RF = gate_up_RM.chunk(2, dim=-1)
        grad_RM = torch.empty_like(gate_up_RM)
        gate_grad_RF, up_grad_RF = grad_RM.chunk(2, dim=-1)
        torch.mul(grads[0], nn.functional.silu(gate_RF), out=up_grad_RF)
        gate_grad_RF.copy_(torch.ops.aten.silu_backward(grads[0] * up_RF, gate_RF))
        return grad_RM
