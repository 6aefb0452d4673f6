"""The interface between the loop and whatever generates completions.

Owns requests, completions and the rule about weights: an engine says which version it sampled
with, and the loop checks it. `local.py` generates with the live model; a server (vLLM, SGLang) is
another class with these three methods.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from trainer.config.rl import RolloutConfig


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        max_new_tokens: Longest completion, the stop token counted.
        temperature: Divides the logits; 0: the most likely token, always.
        top_p: Smallest set of tokens of this probability; 1: all.
        top_k: The k most likely tokens; 0: all.
        stop_ids: Tokens that end a completion.
    """

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_ids: tuple[int, ...]

    @classmethod
    def from_config(cls, config: RolloutConfig, stop_ids: Sequence[int]) -> "Sampling":
        """Return the sampling that the `rollout` section asks for."""
        return cls(
            config.max_new_tokens, config.temperature, config.top_p, config.top_k, tuple(stop_ids)
        )

    def greedy(self) -> "Sampling":
        """Return the same limits with the most likely token each time."""
        return Sampling(self.max_new_tokens, 0.0, 1.0, 0, self.stop_ids)


@dataclass(frozen=True)
class Request:
    """One prompt and how many completions of it are wanted.

    Attributes:
        prompt_ids: At least one token.
        seeds: One a completion: the same seed gives the same completion, whatever else is
            generated beside it and on however many ranks.
    """

    prompt_ids: tuple[int, ...]
    seeds: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Completion:
    """What was sampled for a prompt.

    Attributes:
        ids: Sampled tokens, a stop token included.
        log_probs: fp32 log-probability of each under softmax(logits / temperature), over the
            whole vocabulary: top-p and top-k choose among tokens and do not enter.
        is_truncated: Whether it ended at `max_new_tokens` rather than at a stop token.
        version: Of the weights that it was sampled with.
    """

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    is_truncated: bool
    version: int


def go_on() -> None:
    """Let sampling continue, whatever happened meanwhile."""


class Engine(Protocol):
    """Generates completions."""

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        before_batch: Callable[[], None] = go_on,
        is_given_up: Callable[[], bool] = bool,
    ) -> list[tuple[Completion, ...]]:
        """Return the completions of each request, in order.

        Args:
            requests: This rank's.
            sampling: How tokens are chosen.
            before_batch: Called now and then, as often on every rank; what it raises gives up the
                sampling on all of them.
            is_given_up: Asked on this rank alone, at any moment: once true, the sooner the engine
                returns the better, and what it returns is thrown away.

        Collective: all ranks call together, each with its own requests, equally many.
        """
        ...

    def push_weights(self, version: int) -> None:
        """Make the weights as they are now those that `generate` uses, under this version.

        Collective: all ranks.
        """
        ...

    def weights_version(self) -> int:
        """Return the version that `generate` would use now."""
        ...


def check_version(completions: Sequence[Completion], expected: int) -> None:
    """Refuse samples of other weights than those that were pushed.

    Raises:
        RuntimeError: an engine sampled with stale (or newer) weights.
    """
    versions = {completion.version for completion in completions} - {expected}
    if versions:
        raise RuntimeError(
            f"the engine sampled with weights of version {min(versions)} after version {expected} "
            "was pushed: training on these samples would be off-policy unasked"
        )
