"""The record of a sample: what was asked, written, earned, and with which weights.

Owns the plain data of rollouts and their files. How they are made is `trainer.loops.rl.collect`'s.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Self

from trainer.rl.advantages import is_constant

LINE_BREAKS = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}
"""What JSON leaves as it is and some readers take for the end of a line, escaped."""


@dataclass(frozen=True)
class Rollout:
    """One completion of one prompt; all values are plain, so that JSON keeps them exactly.

    Attributes:
        group: Which prompt of the batch it completes.
        where: File and line, or task and item, of the prompt.
        question: The prompt for people: its last user turn, or the text.
        prompt: Text that the model was given.
        completion: Text that it wrote.
        answer: What was found in it; None if nothing.
        reference: The reference answer.
        reward: Weighted sum of the scores, the penalty of a truncated completion taken off.
        scores: Each reward's own score, by name.
        is_pass: Whether the deciding reward gave its full score.
        num_errors: Rewards that failed on it.
        advantage: Within its group.
        is_truncated: Whether it ended for its length.
        version: Of the weights that it was sampled with: optimizer steps done by then.
        prompt_ids: Tokens of the prompt.
        ids: Tokens of the completion, a stop token included.
        log_probs: The sampler's, of each of these.
        old_log_probs: The trainer's before the first update; None unless recomputed.
        source: Name of the prompt's source in a mix; empty without one.
    """

    group: int
    where: str
    question: str
    prompt: str
    completion: str
    answer: str | None
    reference: str
    reward: float
    scores: Mapping[str, float]
    is_pass: bool
    num_errors: int
    advantage: float
    is_truncated: bool
    version: int
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    old_log_probs: tuple[float, ...] | None = None
    source: str = ""

    def state_dict(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Return the rollout that `state_dict` described."""
        old = state["old_log_probs"]
        return cls(
            **{
                **state,
                "prompt_ids": tuple(state["prompt_ids"]),
                "ids": tuple(state["ids"]),
                "log_probs": tuple(state["log_probs"]),
                "old_log_probs": None if old is None else tuple(old),
            }
        )


def in_groups(rollouts: Sequence[Rollout], num_samples: int) -> list[tuple[Rollout, ...]]:
    """Return rollouts, which lie group by group, as groups."""
    starts = range(0, len(rollouts), num_samples)
    return [tuple(rollouts[start : start + num_samples]) for start in starts]


def rollout_metrics(groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    """Return what a batch says about the policy that sampled it, by metric name."""
    rollouts = [rollout for group in groups for rollout in group]
    lengths = [len(rollout.ids) for rollout in rollouts]
    constant = [is_constant([rollout.reward for rollout in group]) for group in groups]
    rewards = [rollout.reward for rollout in rollouts]
    return {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        **{
            f"reward/{name}": fmean(rollout.scores[name] for rollout in rollouts)
            for name in rollouts[0].scores
        },
        "rollout/length_mean": fmean(lengths),
        "rollout/length_max": max(lengths),
        "rollout/truncated": fmean(rollout.is_truncated for rollout in rollouts),
        "rollout/constant_groups": fmean(constant),
        "rollout/num_samples": len(rollouts),
        **pass_rates("rollout/pass_rate", rollouts),
    }


def pass_rates(metric: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the share of passes, and of each source of a mix that of its own, by metric name."""
    by_source: dict[str, list[bool]] = {}
    for rollout in rollouts:
        if rollout.source:
            by_source.setdefault(rollout.source, []).append(rollout.is_pass)
    apart = {f"{metric}/{name}": fmean(passes) for name, passes in by_source.items()}
    return {metric: fmean(rollout.is_pass for rollout in rollouts)} | apart


def write_rollouts(rollouts: Sequence[Rollout], folder: Path, step: int) -> None:
    """Write `step_N.jsonl`, one rollout a line, N the step that first trains on them."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(rollout.state_dict(), ensure_ascii=False) for rollout in rollouts]
    text = "".join(line.translate(LINE_BREAKS) + "\n" for line in lines)
    beside = folder / f"step_{step}.partial"
    beside.write_text(text, encoding="utf-8")
    beside.replace(folder / f"step_{step}.jsonl")


def cut_rollouts_after(folder: Path, step: int) -> None:
    """Remove the files of steps after a checkpoint's: a resumed run writes them again."""
    for path in folder.glob("step_*.jsonl"):
        number = path.stem.removeprefix("step_")
        if number.isdecimal() and int(number) > step:
            path.unlink()
