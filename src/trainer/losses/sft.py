"""The supervised loss: weighted cross-entropy plus load balancing, both additive."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class SupervisedOutputs(Protocol):
    """What this loss reads of a model's outputs (`trainer.model.outputs.TokenOutputs`)."""

    @property
    def log_probs_PS(self) -> Tensor:  # noqa: N802 - shape suffix
        """fp32 log-probability of each target; 0 where there is none."""
        ...

    @property
    def load_balancing_P(self) -> Tensor:  # noqa: N802 - shape suffix
        """fp32 load-balancing loss of each pack."""
        ...


@dataclass(frozen=True)
class LossTerms:
    """This micro-batch's share of the global loss; shares over ranks and micro-batches add up.

    Attributes:
        total: fp32 0-d, to call `backward()` on.
        cross_entropy: fp32 0-d, detached, without load balancing: `loss/mean` once summed.
        load_balancing: fp32 0-d, detached, before its coefficient.
    """

    total: Tensor
    cross_entropy: Tensor
    load_balancing: Tensor


def sft_loss(
    outputs: SupervisedOutputs,
    weights_PS: Tensor,
    *,
    total_weight: Tensor,
    load_balancing_coef: float = 0.0,
) -> LossTerms:
    """Return Σ w·(−log p) / W + coef · Σ_packs (Σ_pack w) · load_balancing / W.

    W is the weight of all trained tokens of the step, over every rank and micro-batch, so neither
    term depends on how packs are split. Gradients are summed over ranks, never averaged.

    Args:
        outputs: of this micro-batch.
        weights_PS: fp32, each target's weight, 0 where it is not trained.
        total_weight: 0-d, W. Zero (nothing trained anywhere) gives a loss of 0.
        load_balancing_coef: weight of the load-balancing term; 0 leaves it out of the graph.
    """
    log_probs_PS = outputs.log_probs_PS
    weights_PS = weights_PS.to(log_probs_PS.dtype)
    denominator = torch.where(total_weight > 0, total_weight, torch.ones_like(total_weight))
    cross_entropy = -(weights_PS * log_probs_PS).sum() / denominator
    load_balancing = (weights_PS.sum(1) * outputs.load_balancing_P).sum() / denominator
    total = cross_entropy
    if load_balancing_coef:
        total = total + load_balancing_coef * load_balancing
    return LossTerms(total, cross_entropy.detach(), load_balancing.detach())


def perplexity(mean_loss: float) -> float:
    """Return exp(mean_loss), inf where it overflows.

    Args:
        mean_loss: mean cross-entropy in nats per token, over all ranks.
    """
    try:
        return math.exp(mean_loss)
    except OverflowError:
        return math.inf
