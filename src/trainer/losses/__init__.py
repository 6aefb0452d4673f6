"""Losses as sums over a given global denominator, so that ranks and micro-batches add up.

Owns how per-token log-probabilities become a number to minimise. Does not own the model's forward
(`trainer.model`) nor the reduction over ranks (`trainer.step`). Read next: `sft.py`.
"""

from trainer.losses.sft import LossTerms, perplexity, sft_loss

__all__ = ["LossTerms", "perplexity", "sft_loss"]
