"""What a model's forward hands back: per-token results and routing statistics, never full logits.

Owns the shape of that result. Who fills it: `causal_lm.py` (log-probs from `log_probs.py`, routing
terms from `load_balancing.py`). Who reads it: the losses and the loops.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TokenOutputs:
    """Everything a loss or a metric needs from one micro-batch on this rank.

    Attributes:
        log_probs_PS: fp32 log-probability of each target; exactly 0 where the target is -100.
        entropy_PS: fp32 entropy in nats of each prediction, without gradient; None unless asked
            for; 0 where the target is -100.
        load_balancing_P: fp32 load-balancing loss of each pack, the mean over MoE layers; zeros
            for a dense model.
        expert_counts_LE: int64 tokens of this micro-batch sent to each expert in each MoE layer;
            `[0, 0]` for a dense model.
    """

    log_probs_PS: Tensor
    entropy_PS: Tensor | None
    load_balancing_P: Tensor
    expert_counts_LE: Tensor
