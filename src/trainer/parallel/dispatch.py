"""Sends each token to the ranks that hold its experts, and brings the results back.

Owns the permutation of tokens by expert and the all-to-all over the `ep` axis, both with their
gradients. Does not own routing (`trainer.model.router`) nor the experts (`trainer.model.experts`).

Three phases, in the order of a forward: `plan_dispatch` (who gets what), `dispatch_tokens`
(tokens by expert, `[R, D]`), `combine_tokens` (back to `[T, D]`, weighted). R, the number of rows
on this rank, is T·K without expert parallelism, else whatever the other ranks sent, zero included.

Rows are ordered by expert, then source rank, then token: the order in which one process holding
all ranks' tokens would have them. So an expert's inputs do not depend on the number of ranks.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Permutation:
    """`order[i]` is the source of row i; `inverse[j]` is where source j went."""

    order: Tensor
    inverse: Tensor

    def inverted(self) -> "Permutation":
        """Return the way back."""
        return Permutation(self.inverse, self.order)


@dataclass(frozen=True)
class Wire:
    """The all-to-all of one dispatch as seen by this rank.

    Attributes:
        group: the process group of the `ep` axis.
        sent_rows, received_rows: rows to and from each rank of the group.
        regroup: from (source rank, expert) order, as received, to (expert, source rank) order.
    """

    group: dist.ProcessGroup
    sent_rows: list[int]
    received_rows: list[int]
    regroup: Permutation


@dataclass(frozen=True)
class DispatchPlan:
    """Where each (token, choice) goes; plain data for one forward of one layer.

    Attributes:
        by_expert: sorts the T·K choices by expert, stable.
        offsets_E: int32 `[local_E]`, the end of each local expert's rows among the R rows.
        num_choices: K.
        wire: None when this rank holds every expert.
    """

    by_expert: Permutation
    offsets_E: Tensor
    num_choices: int
    wire: Wire | None


def plan_dispatch(
    experts_TK: Tensor, num_experts: int, group: dist.ProcessGroup | None
) -> DispatchPlan:
    """Work out the permutation and, over more than one rank, the split sizes.

    Over more than one rank the host waits once for the device: NCCL and gloo take split sizes as
    Python integers. One rank never waits.

    Args:
        experts_TK: `[T, K]`, int64, the experts of each token, global indices.
        num_experts: E, over all ranks.
        group: the `ep` axis; None or a group of one: every expert is here. Rank i of the group
            holds experts `[i·E/ep, (i+1)·E/ep)`.

    Collective: `ep` axis, one all-to-all of E/ep counts per rank; every rank of the group calls,
        also with T = 0.
    """
    sorted_experts, order = experts_TK.reshape(-1).sort(stable=True)
    experts_E = torch.arange(num_experts, device=experts_TK.device)
    ends_E = torch.searchsorted(sorted_experts, experts_E, right=True)
    by_expert = _permutation(order)
    num_choices = experts_TK.shape[1]
    if group is None or dist.get_world_size(group) == 1:
        return DispatchPlan(by_expert, ends_E.to(torch.int32), num_choices, None)
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    wire, offsets_E = _plan_wire(counts_E, group)
    return DispatchPlan(by_expert, offsets_E, num_choices, wire)


def dispatch_tokens(x_TD: Tensor, plan: DispatchPlan) -> Tensor:
    """Copy each token once per choice and bring the copies to their experts.

    Args:
        x_TD: `[T, D]`, this rank's tokens.
        plan: of this forward.

    Returns:
        `[R, D]`, rows of the local experts in order, `plan.offsets_E` marking their ends.

    Collective: `ep` axis, one uneven all-to-all of T·K rows of D (and one in the backward); every
        rank of the group calls, also with nothing to send.
    """
    rows = _take_rows(x_TD, plan.by_expert, plan.num_choices)
    if plan.wire is None:
        return rows
    rows = _exchange(rows, plan.wire.sent_rows, plan.wire.received_rows, plan.wire.group)
    return _take_rows(rows, plan.wire.regroup)


def combine_tokens(rows_RD: Tensor, weights_TK: Tensor, plan: DispatchPlan) -> Tensor:
    """Bring the experts' results back and add up each token's K results by weight.

    Weights stay on the rank of their token; they never cross the wire.

    Args:
        rows_RD: `[R, D]`, in the order of `dispatch_tokens`.
        weights_TK: `[T, K]`, same dtype.
        plan: of this forward.

    Returns:
        `[T, D]`, this rank's tokens.

    Collective: as `dispatch_tokens`, in the other direction.
    """
    if plan.wire is not None:
        rows_RD = _take_rows(rows_RD, plan.wire.regroup.inverted())
        rows_RD = _exchange(rows_RD, plan.wire.received_rows, plan.wire.sent_rows, plan.wire.group)
    choices = _take_rows(rows_RD, plan.by_expert.inverted())
    choices_TKD = choices.view(*weights_TK.shape, rows_RD.shape[1])
    # Not bmm: on a CPU in fp32 it takes five times as long for rows this small.
    return (choices_TKD * weights_TK.unsqueeze(2)).sum(1)


def _plan_wire(counts_E: Tensor, group: dist.ProcessGroup) -> tuple[Wire, Tensor]:
    ep_size = dist.get_world_size(group)
    received_counts = torch.empty_like(counts_E)
    dist.all_to_all_single(received_counts, counts_E, group=group)
    received_counts = received_counts.view(ep_size, -1)  # [source rank, local expert]
    sent = counts_E.view(ep_size, -1).sum(1)
    sent_rows, received_rows = _to_host(torch.stack([sent, received_counts.sum(1)]))
    local_experts = torch.arange(received_counts.shape[1], device=counts_E.device)
    experts_R = local_experts.repeat(ep_size).repeat_interleave(
        received_counts.flatten(), output_size=sum(received_rows)
    )
    regroup = _permutation(experts_R.sort(stable=True).indices)
    offsets_E = received_counts.sum(0).cumsum(0).to(torch.int32)
    return Wire(group, sent_rows, received_rows, regroup), offsets_E


def _to_host(sizes: Tensor) -> list[list[int]]:
    """The only wait for the device in this module."""
    return sizes.tolist()


def _permutation(order: Tensor) -> Permutation:
    positions = torch.arange(order.shape[0], device=order.device)
    return Permutation(order, torch.empty_like(order).scatter_(0, order, positions))


def _take_rows(x: Tensor, permutation: Permutation, copies: int = 1) -> Tensor:
    return _TakeRows.apply(x, permutation, copies)  # pyright: ignore[reportReturnType]


def _exchange(
    rows: Tensor, sent_rows: list[int], received_rows: list[int], group: dist.ProcessGroup
) -> Tensor:
    return _Exchange.apply(rows, sent_rows, received_rows, group)  # pyright: ignore[reportReturnType]


class _TakeRows(torch.autograd.Function):
    """Permutes rows, each source row standing for `copies` consecutive ones.

    Both directions only gather, so the result is bitwise repeatable on every device, which the
    fp32 backward of `x[index]` is not.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, permutation: Permutation, copies: int) -> Tensor:
        ctx.permutation, ctx.copies = permutation, copies
        order = permutation.order
        return x.index_select(0, order if copies == 1 else order // copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0].index_select(0, ctx.permutation.inverse)
        if ctx.copies > 1:
            grad = grad.view(-1, ctx.copies, grad.shape[1]).sum(1)
        return grad, None, None


class _Exchange(torch.autograd.Function):
    """An uneven all-to-all of rows; its gradient is the all-to-all the other way."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        sent_rows: list[int],
        received_rows: list[int],
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.sent_rows, ctx.received_rows, ctx.group = sent_rows, received_rows, group
        return _all_to_all(rows, sent_rows, received_rows, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = _all_to_all(grads[0], ctx.received_rows, ctx.sent_rows, ctx.group)
        return grad, None, None, None


def _all_to_all(
    rows: Tensor, sent_rows: list[int], received_rows: list[int], group: dist.ProcessGroup
) -> Tensor:
    received = rows.new_empty(sum(received_rows), rows.shape[1])
    dist.all_to_all_single(received, rows.contiguous(), received_rows, sent_rows, group=group)
    return received
