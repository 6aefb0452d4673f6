"""The choice of the next token: reproducible per completion, with its log-probability.

Owns the noise, a function of a completion's seed and the position alone, and the log-probabilities
recorded. Temperature, top-k and top-p are transformers' own processors. `local.py` uses it.
"""

import math
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from torch import LongTensor, Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from trainer.rl.engine import Sampling

_UNITS = 2**52
"""Parts of a probability of 1; a sum of them stays exact in fp64."""


def draw_noise(seeds: Sequence[Sequence[int]], num_positions: int) -> Tensor:
    """Return fp64 uniform numbers in [0, 1), one row a seed, one column a position.

    A row depends on its seed alone, and a longer row begins with the shorter one.
    """
    rows = [
        np.random.Generator(np.random.Philox(list(seed))).random(num_positions) for seed in seeds
    ]
    return torch.from_numpy(np.stack(rows))


def pick_tokens(scores: Tensor, noise: Tensor) -> Tensor:
    """Return the token at which the distribution function passes the noise, int64, one a row.

    Args:
        scores: One row of logits (or log-probabilities) a completion, -inf for excluded tokens.
        noise: fp64 in [0, 1), one a row.

    Probabilities are summed as integer multiples of 2**-52: exact in any order, so deterministic on
    a GPU too, and an excluded token, which adds nothing, is never the first to pass. Scores that
    differ by rounding (another number of ranks) give another token only where the noise falls
    within that rounding of a step.
    """
    mass = (scores.double().softmax(-1) * _UNITS).long().cumsum(-1)
    total = mass[:, -1:]
    threshold = torch.minimum((noise.unsqueeze(1) * total).long(), total - 1)
    return torch.searchsorted(mass, threshold, right=True).squeeze(1)


class TokenChoice(LogitsProcessor):
    """Chooses a token for every row and leaves only that one possible.

    The last logits processor of a greedy `generate`: what it leaves is what is taken. It also
    sees to it that a completion that has ended ends again at once, which `generate` does not know
    of completions whose first token it did not choose.

    Args:
        sampling: Temperature, top-k, top-p, stop tokens.
        noise: fp64, one row a completion, one column a position.
        is_given_up: Asked before each token; once true, every completion ends.

    Attributes:
        log_probs: fp32 log-probabilities of the chosen tokens so far, one tensor a position.
    """

    def __init__(
        self, sampling: Sampling, noise: Tensor, is_given_up: Callable[[], bool] = bool
    ) -> None:
        self._sampling = sampling
        self._noise = noise
        self._is_given_up = is_given_up
        self._filters = _filters(sampling)
        self._has_ended = torch.zeros(len(noise), dtype=torch.bool, device=noise.device)
        self.log_probs: list[Tensor] = []

    def first(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        """Return the first token of each completion from the prompt's logits, int64."""
        return self._choose(cast(LongTensor, input_ids), logits)

    def __call__(self, input_ids: LongTensor, scores: Tensor) -> Tensor:
        """Return scores that leave one token a row."""
        tokens = self._choose(input_ids, scores)
        only = torch.full_like(scores, -math.inf)
        return only.scatter_(1, tokens.unsqueeze(1), 0.0)

    def _choose(self, input_ids: LongTensor, logits: Tensor) -> Tensor:
        position = len(self.log_probs)
        if self._sampling.temperature == 0:
            scaled = logits.float()
            tokens = scaled.argmax(-1)
        else:
            scaled = TemperatureLogitsWarper(self._sampling.temperature)(input_ids, logits.float())
            tokens = pick_tokens(self._filters(input_ids, scaled), self._noise[:, position])
        if self._is_given_up():
            self._has_ended = torch.ones_like(self._has_ended)
        stop_ids = torch.tensor(self._sampling.stop_ids, device=tokens.device)
        tokens = torch.where(self._has_ended, stop_ids[0], tokens)
        self._has_ended = self._has_ended | torch.isin(tokens, stop_ids)
        self.log_probs.append(scaled.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1))
        return tokens


def _filters(sampling: Sampling) -> LogitsProcessorList:
    filters = LogitsProcessorList()
    if sampling.top_k > 0:
        filters.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        filters.append(TopPLogitsWarper(sampling.top_p))
    return filters
