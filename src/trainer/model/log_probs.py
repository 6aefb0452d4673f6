"""Log-probabilities of target tokens without ever holding the logits of all tokens.

Owns the chunked projection onto the vocabulary, forward and backward. Does not own the loss made
of its result: see `trainer.losses`. What follows a chunk's product is memory-bound: on a GPU
torch.compile makes one kernel of it that reads the logits once.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

IGNORED_TARGET = -100
"""The target of a token that is not trained; transformers' and torch's value."""


def token_log_probs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    *,
    temperature: float = 1.0,
    target_rows_N: Tensor | None = None,
    chunk_tokens: int = 4096,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability of each target under `softmax(hidden @ weight.T / temperature)`.

    Logits exist for `chunk_tokens` tokens at a time, in the forward and, computed again, in the
    backward. Only rows with a target are computed, so prompts and padding cost nothing. Logits are
    rounded to the dtype of `hidden_TD` as in transformers, then raised to fp32 (fp64 stays fp64).

    Args:
        hidden_TD: `[T, D]`, the last hidden states, local.
        weight_VD: `[V, D]`, the output projection, whole on this rank, same dtype.
        targets_T: `[T]`, int64 in `[0, V)`, or -100 for none.
        temperature: divides the logits; above 0.
        target_rows_N: `[N]`, int64, the rows that have a target, in order; None: they are looked
            for, for which the host waits for the device.
        chunk_tokens: tokens whose logits exist at once; at least 1.
        with_entropy: also return the entropy of each prediction (no gradient).

    Returns:
        `[T]` fp32 log-probabilities, exactly 0 where the target is -100 (and no gradient from
        there), and `[T]` fp32 entropies in nats or None. With no target at all the gradients are
        zero, not None.
    """
    weight_VD = _whole(weight_VD)
    rows_N = target_rows_N
    if rows_N is None:
        rows_N = (targets_T != IGNORED_TARGET).nonzero().squeeze(1)
    log_probs_T, entropy_T = _TokenLogProbs.apply(  # pyright: ignore[reportGeneralTypeIssues]
        hidden_TD, weight_VD, targets_T, rows_N, temperature, chunk_tokens, with_entropy
    )
    return log_probs_T, entropy_T if with_entropy else None


def _whole(weight: Tensor) -> Tensor:
    if not isinstance(weight, DTensor):
        return weight
    assert all(p.is_replicate() for p in weight.placements), (
        f"the output projection is sharded ({weight.placements}): call inside FSDP's forward"
    )
    return weight.to_local()


class _TokenLogProbs(torch.autograd.Function):
    """Saves hidden states and one fp32 log-sum-exp a row; recomputes logits in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        targets_T: Tensor,
        rows_N: Tensor,
        temperature: float,
        chunk_tokens: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
        log_probs_T = hidden_TD.new_zeros(hidden_TD.shape[0], dtype=dtype)
        entropy_T = torch.zeros_like(log_probs_T)
        log_norms: list[Tensor] = []
        score = _fused(_score_) if hidden_TD.is_cuda else _score_
        for rows in rows_N.split(chunk_tokens):
            logits_NV = hidden_TD.index_select(0, rows) @ weight_VD.T
            targets = targets_T.index_select(0, rows)
            log_probs, log_norm, entropy = score(logits_NV, targets, temperature, with_entropy)
            log_probs_T.index_copy_(0, rows, log_probs)
            log_norms.append(log_norm)
            if entropy is not None:
                entropy_T.index_copy_(0, rows, entropy)
        ctx.save_for_backward(hidden_TD, weight_VD, targets_T, rows_N, torch.cat(log_norms))
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.mark_non_differentiable(entropy_T)
        return log_probs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, targets_T, rows_N, log_norms_N = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        hidden_grad = torch.zeros_like(hidden_TD) if needs_hidden else None
        weight_grad = None
        logits_grad = _fused(_logits_grad_) if hidden_TD.is_cuda else _logits_grad_
        chunks = rows_N.split(ctx.chunk_tokens)
        # Chunks add up in fp32: in bf16 a sum over many would lose the small ones.
        sum_dtype = log_norms_N.dtype if len(chunks) > 1 else weight_VD.dtype
        for rows, log_norm in zip(chunks, log_norms_N.split(ctx.chunk_tokens), strict=True):
            hidden = hidden_TD.index_select(0, rows)
            grad_NV = logits_grad(
                hidden @ weight_VD.T,
                log_norm,
                targets_T.index_select(0, rows),
                grads[0].index_select(0, rows),
                ctx.temperature,
            )
            if hidden_grad is not None:
                hidden_grad.index_copy_(0, rows, grad_NV @ weight_VD)
            if needs_weight and weight_grad is None:
                weight_grad = (grad_NV.T @ hidden).to(sum_dtype)
            elif weight_grad is not None:
                weight_grad.add_(grad_NV.T @ hidden)
            del grad_NV  # before the next chunk makes its own
        if weight_grad is not None:
            weight_grad = weight_grad.to(weight_VD.dtype)
        return hidden_grad, weight_grad, None, None, None, None, None


@cache
def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def _score_(
    logits_NV: Tensor, targets_N: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return each target's log-probability, the log-sum-exp and the entropy; may use the logits."""
    logits_NV = _raise(logits_NV, temperature)
    log_norm_N = logits_NV.logsumexp(1)
    log_probs_NV = logits_NV.sub_(log_norm_N.unsqueeze(1))
    log_probs_N = log_probs_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1)
    entropy_N = -(log_probs_NV.exp().mul_(log_probs_NV)).sum(1) if with_entropy else None
    return log_probs_N, log_norm_N, entropy_N


def _logits_grad_(
    logits_NV: Tensor, log_norm_N: Tensor, targets_N: Tensor, grad_N: Tensor, temperature: float
) -> Tensor:
    """Return grad · (one-hot(target) − softmax) / temperature; may overwrite the logits."""
    grad_N1 = (grad_N / temperature).unsqueeze(1)
    probs_NV = _raise(logits_NV, temperature).sub_(log_norm_N.unsqueeze(1)).exp_()
    grad_NV = probs_NV.mul_(-grad_N1)
    # Not scatter_add_: that would keep a GPU from doing all of this in one pass.
    vocabulary_V = torch.arange(grad_NV.shape[1], device=grad_NV.device)
    is_target_NV = vocabulary_V == targets_N.unsqueeze(1)
    return torch.where(is_target_NV, grad_NV + grad_N1, grad_NV).to(logits_NV.dtype)


def _raise(logits_NV: Tensor, temperature: float) -> Tensor:
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    return logits_NV if temperature == 1.0 else logits_NV.div_(temperature)
