"""Policy losses: clipped ratios (PPO, GRPO, DAPO), CISPO and GSPO, as sums over global counts.

Owns the formulas per token and what is measured beside them. Advantages come from `trainer.rl`,
log-probabilities from the model; the reduction over ranks is the loop's.

For token t of completion i, with l the trainer's log-probability, o the old one, s the sampler's,
A the advantage and r = exp(l − o):

- `clip`: −min(r·A, clip(r, 1 − low, 1 + high)·A)
- `cispo`: −sg[clip(r, 1 − low, 1 + high)]·A·l
- `gspo`: `clip` with r replaced by sg[q]·exp(l − sg[l]), q = exp(mean over i's tokens of (l − o))

Source: PPO (arXiv 1707.06347), DAPO (2503.14476), CISPO (2506.13585), GSPO (2507.18071). It differs
from what is published: the mean is over all trained tokens of the step, over all ranks, unless
`reduction = "sequence"` (GRPO's and GSPO's mean of means); prime-rl drops tokens by the difference
of probabilities where these bound the ratio.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config.rl import CISPOLossConfig, ClipLossConfig, GSPOLossConfig, LossConfig

SUMS = (
    "num_tokens",
    "nll",
    "ratio",
    "clipped",
    "mismatch_kl",
    "importance",
    "masked",
    "entropy",
    "reference_kl",
)
"""Names of `PolicyTerms.sums`, in order."""


@dataclass(frozen=True)
class PolicyTokens:
    """Everything the loss reads of one micro-batch; all `[P, S]`, on one rank.

    Attributes:
        log_probs: fp32, the trainer's, with gradient; at the sampling temperature.
        entropy: fp32, of the trainer's predictions, without gradient.
        sampler_log_probs: fp32, recorded when the tokens were sampled.
        old_log_probs: fp32, what the policy ratio is taken to.
        anchor_log_probs: fp32, the trainer's before the first update (for fresh samples: now);
            its distance from the sampler's is the mismatch.
        reference_log_probs: fp32, of the model that the run starts from; None without that term.
        advantages: fp32, the completion's at each of its tokens.
        weights: fp32, of each trained token in the mean; 0 elsewhere.
        completions: int64, which completion of the micro-batch a position belongs to, from 0;
            only read where weights are above 0.
    """

    log_probs: Tensor
    entropy: Tensor
    sampler_log_probs: Tensor
    old_log_probs: Tensor
    anchor_log_probs: Tensor
    reference_log_probs: Tensor | None
    advantages: Tensor
    weights: Tensor
    completions: Tensor


@dataclass(frozen=True)
class PolicyTerms:
    """This micro-batch's share of the step; sums over ranks and micro-batches add up.

    Attributes:
        loss: fp32 0-d, to call `backward()` on.
        sums: fp64, in the order of `SUMS`, each trained token counted once.
        ratio_range: fp64 `[2]`, minus the smallest and the largest ratio; -inf without tokens.
            Both combine by maximum.
    """

    loss: Tensor
    sums: Tensor
    ratio_range: Tensor


def policy_loss(tokens: PolicyTokens, config: LossConfig, total_weight: Tensor) -> PolicyTerms:
    """Return Σ w·(policy + kl_coef·KL − entropy_coef·H) / W and what was measured.

    Args:
        tokens: Of this micro-batch.
        config: The `loss` section.
        total_weight: fp32 0-d, W: all weights of the step, over all ranks and micro-batches.

    Tokens that `importance` masks stay in W: W does not depend on the weights trained.
    """
    is_trained = tokens.weights > 0
    ratio = torch.exp(torch.where(is_trained, tokens.log_probs - tokens.old_log_probs, 0.0))
    correction, is_kept = importance_correction(tokens, config, is_trained)
    policy, is_clipped = _policy_term(tokens, ratio, config)
    kept_weights = tokens.weights * is_kept
    per_token = kept_weights * correction * policy
    reference_kl = torch.zeros_like(policy)
    if tokens.reference_log_probs is not None:
        reference_kl = k3(tokens.reference_log_probs - tokens.log_probs)
        per_token = per_token + config.kl_coef * tokens.weights * reference_kl
    if config.entropy_coef:
        bonus = entropy_surrogate(tokens.log_probs, tokens.entropy, ratio)
        per_token = per_token - config.entropy_coef * kept_weights * correction * bonus
    # Outside trained tokens log-probabilities are 0, but 0 times a non-finite number is not.
    loss = torch.where(is_trained, per_token, 0.0).sum() / total_weight.clamp_min(1e-30)
    measured = {
        "num_tokens": is_trained.sum(),
        "nll": _sum(-tokens.log_probs, is_trained),
        "ratio": _sum(ratio, is_trained),
        "clipped": _sum(is_clipped, is_trained),
        "mismatch_kl": _sum(k3(tokens.anchor_log_probs - tokens.sampler_log_probs), is_trained),
        "importance": _sum(importance_ratio(tokens, is_trained), is_trained),
        "masked": _sum(~is_kept, is_trained),
        "entropy": _sum(tokens.entropy, is_trained),
        "reference_kl": _sum(reference_kl, is_trained),
    }
    sums = torch.stack([measured[name].double() for name in SUMS])
    return PolicyTerms(loss, sums, _range(ratio.detach(), is_trained))


def k3(log_ratio: Tensor) -> Tensor:
    """Return exp(d) − d − 1 of d = log p − log q, at samples of q an estimate of KL(q ‖ p).

    Never negative, and unbiased. Source: Schulman, Approximating KL Divergence (2020); as in TRL
    (q the policy, p the reference) and prime-rl (q the sampler, p the trainer).
    """
    return torch.expm1(log_ratio) - log_ratio


def importance_ratio(tokens: PolicyTokens, is_trained: Tensor) -> Tensor:
    """Return the trainer's probability before the update over the sampler's; 1 elsewhere."""
    difference = tokens.anchor_log_probs - tokens.sampler_log_probs
    return torch.exp(torch.where(is_trained, difference, 0.0)).detach()


def importance_correction(
    tokens: PolicyTokens, config: LossConfig, is_trained: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the factor of each token's policy term, and bool: whether the token is kept."""
    ratio = importance_ratio(tokens, is_trained)
    everything = torch.ones_like(is_trained)
    match config.importance:
        case "none":
            return torch.ones_like(ratio), everything
        case "truncate":
            return ratio.clamp_max(config.importance_high), everything
        case "mask":
            is_kept = (ratio >= config.importance_low) & (ratio <= config.importance_high)
            return torch.ones_like(ratio), is_kept


def entropy_surrogate(log_probs: Tensor, entropy: Tensor, ratio: Tensor) -> Tensor:
    """Return a term whose gradient is, on average over samples, that of the entropy.

    ∇H = −E[(log p + H)·∇log p], H being a baseline that changes no mean; off-policy the ratio
    corrects the average. So the gradient needs the sampled token's log-probability alone, never the
    logits of the vocabulary.
    """
    return -(ratio * (log_probs + entropy)).detach() * log_probs


def _policy_term(tokens: PolicyTokens, ratio: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Return the policy loss of each token, and bool: whether its ratio is clipped."""
    match config:
        case ClipLossConfig():
            return _clipped(ratio, tokens.advantages, config)
        case CISPOLossConfig():
            weight = ratio.detach().clamp(1 - config.clip_low, 1 + config.clip_high)
            return -weight * tokens.advantages * tokens.log_probs, weight != ratio.detach()
        case GSPOLossConfig():
            return _clipped(sequence_ratio(tokens), tokens.advantages, config)


def _clipped(
    ratio: Tensor, advantages: Tensor, config: ClipLossConfig | GSPOLossConfig
) -> tuple[Tensor, Tensor]:
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    # Clipped where the bound takes the gradient away: too far in the advantage's own direction.
    is_clipped = clipped * advantages < ratio * advantages
    return -torch.minimum(ratio * advantages, clipped * advantages), is_clipped


def sequence_ratio(tokens: PolicyTokens) -> Tensor:
    """Return at each token its completion's ratio, with the token's own share of the gradient.

    Value: exp(mean of log_probs − old_log_probs over the completion's trained tokens). Gradient:
    as if that value multiplied exp(log_probs − sg[log_probs]), which over a whole completion and
    its mean over tokens is the gradient of the sequence's ratio itself.
    """
    is_trained = tokens.weights > 0
    difference = torch.where(is_trained, tokens.log_probs - tokens.old_log_probs, 0.0).detach()
    index = tokens.completions.flatten()
    # Room for as many completions as positions: finding the number would wait for the device.
    zeros = torch.zeros_like(difference).flatten()
    sums = zeros.index_add(0, index, difference.flatten())
    counts = zeros.index_add(0, index, is_trained.flatten().to(difference.dtype))
    value = torch.exp(sums / counts.clamp_min(1)).index_select(0, index).view_as(difference)
    return value * torch.exp(tokens.log_probs - tokens.log_probs.detach())


def _sum(values: Tensor, is_trained: Tensor) -> Tensor:
    return torch.where(is_trained, values.detach().double(), 0.0).sum()


def _range(ratio: Tensor, is_trained: Tensor) -> Tensor:
    least = torch.where(is_trained, -ratio.double(), -torch.inf).max()
    largest = torch.where(is_trained, ratio.double(), -torch.inf).max()
    return torch.stack([least, largest])
