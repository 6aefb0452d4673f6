"""The mixture-of-experts block that takes the place of transformers' on each MoE layer.

Owns how router and experts join, and how their routing is recorded for the model to collect. Read
next: `router.py`, `experts.py`, `trainer/parallel/dispatch.py`, `load_balancing.py`.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from trainer.model.experts import Experts
from trainer.model.load_balancing import RoutingRecord
from trainer.model.router import Router


class MoEBlock(nn.Module):
    """Router and experts; parameter names and results as in transformers' sparse MoE block.

    Args:
        hidden_size: D.
        moe_intermediate_size: F.
        num_experts: E, over all ranks.
        num_experts_per_tok: K.
        norm_topk_prob: whether a token's K weights are scaled to add up to 1.
        impl: `grouped_mm` or `loop`, from `choose_experts_impl`.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        moe_intermediate_size: int,
        num_experts: int,
        num_experts_per_tok: int,
        norm_topk_prob: bool,
        impl: Literal["grouped_mm", "loop"],
    ) -> None:
        super().__init__()
        self.experts = Experts(
            hidden_size=hidden_size,
            moe_intermediate_size=moe_intermediate_size,
            num_experts=num_experts,
            impl=impl,
        )
        self.gate = Router(
            hidden_size=hidden_size,
            num_experts=num_experts,
            num_experts_per_tok=num_experts_per_tok,
            norm_topk_prob=norm_topk_prob,
        )
        self._records: list[RoutingRecord] | None = None

    # Split sizes come from data, and records leave by a side effect: neither fits a graph.
    @torch.compiler.disable
    def forward(self, x_PSD: Tensor) -> Tensor:
        """Return `[P, S, D]`, the experts' output for `x_PSD`.

        Collective: `ep` axis, as `Experts.forward`.
        """
        x_TD = x_PSD.reshape(-1, x_PSD.shape[-1])
        routing = self.gate(x_TD)
        if self._records is not None:
            leading = x_PSD.shape[:-1]
            self._records.append(
                RoutingRecord(
                    routing.probs_TE.unflatten(0, leading),
                    routing.experts_TK.unflatten(0, leading),
                )
            )
        return self.experts(x_TD, routing.experts_TK, routing.weights_TK).view_as(x_PSD)


@contextmanager
def record_routing(blocks: Iterable[MoEBlock]) -> Iterator[list[RoutingRecord]]:
    """Collect one record per forward of each block while the context is open, in order.

    A forward recomputed by activation checkpointing (in the backward, outside the context) is not
    recorded again, and no block keeps tensors once the context closes.
    """
    blocks, records = list(blocks), []
    for block in blocks:
        block._records = records
    try:
        yield records
    finally:
        for block in blocks:
            block._records = None
