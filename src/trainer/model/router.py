"""The router: which experts each token visits, and with what weight.

Owns the choice and its replay under activation checkpointing. Does not own what is measured about
the choice (`load_balancing.py`) nor how tokens get there (`trainer.parallel.dispatch`).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Routing(NamedTuple):
    """One forward of the router.

    Attributes:
        probs_TE: fp32, the softmax over all experts; carries gradients.
        weights_TK: in the compute dtype, the weights of the chosen experts; carries gradients.
        experts_TK: int64, the chosen experts, the most probable first.
    """

    probs_TE: Tensor
    weights_TK: Tensor
    experts_TK: Tensor


class Router(nn.Module):
    """Softmax over experts in fp32, then the top K; the numbers of transformers' Qwen3 router.

    Args:
        hidden_size: D.
        num_experts: E.
        num_experts_per_tok: K.
        norm_topk_prob: whether a token's K weights are scaled to add up to 1.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_experts: int,
        num_experts_per_tok: int,
        norm_topk_prob: bool,
    ) -> None:
        super().__init__()
        self.num_experts_per_tok = num_experts_per_tok
        self.norm_topk_prob = norm_topk_prob
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self._kept: list[Tensor] | None = None
        self._replayed: Iterator[Tensor] | None = None

    def forward(self, x_TD: Tensor) -> Routing:
        """Route `x_TD` `[T, D]`."""
        logits_TE = nn.functional.linear(x_TD, self.weight)
        dtype = torch.promote_types(logits_TE.dtype, torch.float32)
        probs_TE = logits_TE.softmax(-1, dtype=dtype)
        experts_TK = self._choose(probs_TE.detach())
        weights_TK = probs_TE.gather(1, experts_TK)
        if self.norm_topk_prob:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return Routing(probs_TE, weights_TK.to(logits_TE.dtype), experts_TK)

    def _choose(self, probs_TE: Tensor) -> Tensor:
        if self._replayed is not None:
            return next(self._replayed)
        experts_TK = probs_TE.topk(self.num_experts_per_tok, dim=-1).indices
        if self._kept is not None:
            self._kept.append(experts_TK)
        return experts_TK

    def checkpoint_contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        """Return contexts for the forward and its recomputation that make both choose alike.

        A near-tie may fall the other way when hidden states are recomputed; experts would then
        receive other tokens than in the forward, a wrong gradient or a crash on shapes. So the
        choice is kept (T·K int64) and played back.

        Example:
            checkpoint(layer, x, use_reentrant=False, context_fn=router.checkpoint_contexts)
        """
        kept: list[Tensor] = []
        return self._keeping(kept), self._replaying(kept)

    @contextmanager
    def _keeping(self, kept: list[Tensor]) -> Iterator[None]:
        self._kept = kept
        try:
            yield
        finally:
            self._kept = None

    @contextmanager
    def _replaying(self, kept: list[Tensor]) -> Iterator[None]:
        self._replayed = iter(kept)
        try:
            yield
        finally:
            self._replayed = None
