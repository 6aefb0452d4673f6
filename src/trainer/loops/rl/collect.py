"""Rollouts: prompts are dealt to ranks, completed, scored, gathered and compared in groups.

Owns what happens between prompts and advantages, and that its outcome does not depend on the
number of ranks. Prompts are `prompts.py`'s, completions the engine's, scores `judge.py`'s.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from trainer.config import RLConfig
from trainer.errors import UserError
from trainer.loops.rl.judge import Judge
from trainer.loops.rl.prompts import Prompt, PromptStream
from trainer.parallel.agreement import Ranks
from trainer.parallel.watchdog import set_phase
from trainer.rl.advantages import group_advantages, is_constant
from trainer.rl.engine import Completion, Engine, Request, Sampling, check_version, go_on
from trainer.rl.rollouts import Rollout, rollout_metrics

EVALUATION = 0
"""Round number whose seeds evaluation uses; rounds of training count from 1."""


@dataclass(frozen=True)
class RolloutBatch:
    """One round's rollouts, the same on every rank, and what they say.

    Attributes:
        groups: In the order of the prompts.
        metrics: By name; of the whole batch.
    """

    groups: tuple[tuple[Rollout, ...], ...]
    metrics: dict[str, float]


class Collector:
    """Samples and scores; every rank holds one and all are called together.

    Args:
        config: Of the run.
        engine: Generates.
        sampling: How.
        judge: Scores.
        is_asked_to_stop: Whether this rank was, once for ever; talks to no other.
        stop_if_asked: Raises on all ranks if any was. Collective; as often on every rank.
    """

    def __init__(
        self,
        config: RLConfig,
        engine: Engine,
        sampling: Sampling,
        judge: Judge,
        *,
        is_asked_to_stop: Callable[[], bool] = bool,
        stop_if_asked: Callable[[], None] = go_on,
    ) -> None:
        self._config = config
        self._engine = engine
        self._sampling = sampling
        self._judge = judge
        self._is_asked_to_stop = is_asked_to_stop
        self._stop_if_asked = stop_if_asked
        self._ranks = Ranks()

    def collect(self, stream: PromptStream, round_number: int, version: int) -> RolloutBatch:
        """Return a batch of groups with advantages.

        Args:
            stream: Where prompts come from; moved on.
            round_number: From 1; seeds of the samples.
            version: Of the live weights, to sample with.

        Raises:
            UserError: a prompt is bad, or a reward fails and failures end the run.
            RuntimeError: the engine sampled with other weights.

        Collective: for the batch, then once for each time constant groups are replaced, as often
            on every rank: `Ranks.agree` on errors in reading prompts, then as `complete`.
        """
        rollout, began = self._config.rollout, time.perf_counter()
        self._engine.push_weights(version)
        next_groups = partial(self._next_groups, stream, round_number)
        groups = next_groups(rollout.num_prompts, 0)
        sampled = list(groups)
        for attempt in range(1, rollout.resample + 1):
            constant = [
                i for i, group in enumerate(groups) if is_constant([r.reward for r in group])
            ]
            if not constant:
                break
            first = attempt * rollout.num_prompts
            fresh = next_groups(len(constant), first)
            for index, group in zip(constant, fresh, strict=True):
                groups[index] = group
            sampled += fresh
        seconds = time.perf_counter() - began
        numbered = tuple(self._compare(group, number) for number, group in enumerate(groups))
        # Groups that were replaced took their time and had their errors too.
        everything = [rollout for group in sampled for rollout in group]
        metrics = rollout_metrics(numbered) | {
            "reward/errors": sum(rollout.num_errors for rollout in everything),
            "rollout/resampled_groups": len(sampled) - len(groups),
            "rollout/weights_version": version,
            "rollout/tokens_per_second": sum(len(r.ids) for r in everything) / seconds,
            "time/rollout": seconds,
        }
        return RolloutBatch(numbered, metrics)

    def evaluate(self, prompts: Sequence[Prompt], version: int) -> list[Rollout]:
        """Return one greedy, scored answer to each prompt.

        Collective: as `complete`.
        """
        self._engine.push_weights(version)
        groups = self.complete(prompts, 1, self._sampling.greedy(), EVALUATION, 0)
        return [group[0] for group in groups]

    def complete(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: Sampling,
        round_number: int,
        first: int,
    ) -> list[tuple[Rollout, ...]]:
        """Complete and score prompts; a group each, in their order, the same on every rank.

        Args:
            prompts: The same on every rank; not empty.
            num_samples: Completions of each.
            sampling: How tokens are chosen.
            round_number: With the place of a prompt, the seed of its samples.
            first: Place of the first prompt in the round.

        Raises:
            UserError: ranks hold different prompts, or a reward failed and failures end the run;
                on all ranks.
            RuntimeError: the engine sampled with other weights than were pushed.

        Collective: one all-gather of digests; prompts are dealt over ranks, the engine generates on
            all in step, with `stop_if_asked` ahead of each of its batches; then `Ranks.agree`
            on errors in scoring, `stop_if_asked`, and one all-gather of rollouts.
        """
        # Not timed: sampling rightly takes long, and its collectives have limits of their own.
        set_phase("sample", is_timed=False)
        self._check_equality(prompts)
        places = range(len(prompts))[self._ranks.rank :: self._ranks.size]
        dealt = [(first + place, prompts[place]) for place in places]
        # A rank without a prompt of its own still takes part in every forward pass.
        num_rounds = -(-len(prompts) // self._ranks.size)
        filled = dealt + [(first, prompts[0])] * (num_rounds - len(dealt))
        requests = [
            Request(
                prompt.ids,
                tuple((self._config.seed, round_number, place, i) for i in range(num_samples)),
            )
            for place, prompt in filled
        ]
        completions = self._engine.generate(
            requests, sampling, self._stop_if_asked, self._is_asked_to_stop
        )[: len(dealt)]
        set_phase("score", is_timed=False)
        own = self._score_together(dealt, completions)
        by_rank = self._ranks.gather(own)
        return [
            by_rank[place % self._ranks.size][place // self._ranks.size]
            for place in range(len(prompts))
        ]

    def _check_equality(self, prompts: Sequence[Prompt]) -> None:
        """Refuse prompts that differ between ranks: groups would be of no one question."""
        digest = hashlib.blake2b(b"".join(prompt.key for prompt in prompts)).digest()
        if len(set(self._ranks.gather(digest))) > 1:
            raise UserError(
                "the ranks hold different prompts: env.source or val.source is not the same on "
                "every rank; give all nodes the same files, and seed a function's random numbers "
                "(a set has another order in every process)"
            )

    def _next_groups(
        self, stream: PromptStream, round_number: int, num_prompts: int, first: int
    ) -> list[tuple[Rollout, ...]]:
        prompts = self._ranks.together(lambda: stream.next_prompts(num_prompts))
        num_samples = self._config.rollout.num_samples
        return self.complete(prompts, num_samples, self._sampling, round_number, first)

    def _score_together(
        self,
        dealt: Sequence[tuple[int, Prompt]],
        completions: Sequence[tuple[Completion, ...]],
    ) -> list[tuple[Rollout, ...]]:
        """Score this rank's completions; a refusal on any rank is raised on all, and so is a stop.

        A reward may take seconds a sample, so that a rank which is asked to stop scores no more.
        """
        version = self._engine.weights_version()

        def score() -> list[tuple[Rollout, ...]]:
            groups: list[tuple[Rollout, ...]] = []
            for (_, prompt), group in zip(dealt, completions, strict=True):
                check_version(group, version)
                rollouts: list[Rollout] = []
                for completion in group:
                    if self._is_asked_to_stop():
                        return groups
                    rollouts.append(self._judge.judge(prompt, completion))
                groups.append(tuple(rollouts))
            return groups

        groups = self._ranks.together(score)
        self._stop_if_asked()
        return groups

    def _compare(self, group: Sequence[Rollout], number: int) -> tuple[Rollout, ...]:
        rewards = [rollout.reward for rollout in group]
        advantages = group_advantages(rewards, self._config.loss.advantage)
        return tuple(
            replace(rollout, group=number, advantage=advantage)
            for rollout, advantage in zip(group, advantages, strict=True)
        )
