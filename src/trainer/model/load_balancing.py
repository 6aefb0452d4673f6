"""How evenly tokens spread over experts: the load-balancing loss and the metric `max_vio`.

Owns the formulas. Does not own where routings come from (`moe.py` records them) nor the weight of
the loss (`trainer.losses`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RoutingRecord:
    """One MoE layer's routing of a micro-batch.

    Attributes:
        probs_PSE: fp32, the router's softmax over all experts; carries gradients.
        experts_PSK: int64, the experts chosen.
    """

    probs_PSE: Tensor
    experts_PSK: Tensor


def load_balancing_loss(record: RoutingRecord, mask_PS: Tensor | None = None) -> Tensor:
    """Return the load-balancing loss of each pack, fp32 `[P]`.

    E · Σ_e f_e · p_e, with f_e the choices of expert e per token (they add up to K) and p_e the
    mean probability of e, both over the tokens of one pack; K when spread evenly. Each pack stands
    for itself, so splitting packs over ranks or micro-batches changes nothing.

    Args:
        record: of one layer.
        mask_PS: bool, True for the tokens that count; None: all. A pack with none gives 0.

    Source: Switch Transformer (arXiv 2101.03961, eq. 4-6) for K = 1; for K > 1 as in
        transformers' `load_balancing_loss_func`. Ours is per pack.
    """
    probs_PSE = record.probs_PSE
    num_packs, num_positions, num_experts = probs_PSE.shape
    counts_PE = _pack_counts(record, mask_PS)
    if mask_PS is None:
        num_tokens_P = probs_PSE.new_full((num_packs,), num_positions)
        prob_sums_PE = probs_PSE.sum(1)
    else:
        num_tokens_P = mask_PS.sum(1).to(probs_PSE.dtype)
        prob_sums_PE = (probs_PSE * mask_PS.unsqueeze(-1)).sum(1)
    products_P = (counts_PE.to(probs_PSE.dtype) * prob_sums_PE).sum(1)
    return num_experts * products_P / num_tokens_P.clamp_min(1).square()


def summarize_routing(
    records: Sequence[RoutingRecord], mask_PS: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Condense all MoE layers of one forward; at least one record.

    Returns:
        `load_balancing_P` fp32, the mean over layers, and `expert_counts_LE` int64, the tokens
        each expert was chosen for.
    """
    load_balancing_LP = torch.stack([load_balancing_loss(record, mask_PS) for record in records])
    expert_counts_LE = torch.stack([_pack_counts(record, mask_PS).sum(0) for record in records])
    return load_balancing_LP.mean(0), expert_counts_LE


def max_violation(expert_counts_LE: Tensor) -> Tensor:
    """Return, per layer, how far the busiest expert exceeds the mean: max / mean − 1, fp64 `[L]`.

    Args:
        expert_counts_LE: counts, int64 or fp64, summed over ranks and micro-batches first: the
            metric is not additive. A layer without tokens gives 0; a dense model's `[0, 0]` gives
            an empty tensor.
    """
    num_layers, num_experts = expert_counts_LE.shape
    if num_experts == 0:
        return expert_counts_LE.new_zeros(num_layers, dtype=torch.float64)
    total_L = expert_counts_LE.sum(1)
    share_L = expert_counts_LE.amax(1).double() / total_L.clamp_min(1)
    return torch.where(total_L > 0, num_experts * share_L - 1, 0.0)


def _pack_counts(record: RoutingRecord, mask_PS: Tensor | None) -> Tensor:
    experts_PN = record.experts_PSK.flatten(1)
    if mask_PS is None:
        ones_PN = torch.ones_like(experts_PN)
    else:
        ones_PN = mask_PS.unsqueeze(-1).expand_as(record.experts_PSK).flatten(1).long()
    num_packs, num_experts = experts_PN.shape[0], record.probs_PSE.shape[2]
    # Integer sums are the same in any order, so scatter_add_ is repeatable here.
    return experts_PN.new_zeros(num_packs, num_experts).scatter_add_(1, experts_PN, ones_PN)
