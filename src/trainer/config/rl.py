"""The whole config of `trainer rl`: environment, rollouts, policy loss, evaluation.

Owns the sections that only RL has and what they demand of one another. Sources of prompts are
those of `data.py`; model, optimizer, scheduler and checkpoints those of every run (`sft.py`).
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from trainer.config.base import (
    Bool,
    Count,
    CountOrZero,
    Float,
    Fraction,
    FreeTable,
    FunctionPath,
    NonNegativeFloat,
    OpenFraction,
    PathText,
    Section,
    Text,
)
from trainer.config.data import MixSource, ReasoningGymSource, Source
from trainer.config.sft import RunConfig

Temperature = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=1e-6)]
"""Logits over less would leave fp32."""
RatioBound = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0, le=1e30)]
"""In fp32; the largest is as good as none."""

TAKEN_NAMES = {"mean", "std", "errors"}
"""What is logged under `reward/` beside the rewards' own scores."""
PASS_SCORE = 0.99
"""A sample passes with this score or more; shaped scores below it are no passes."""


class WholeAnswer(Section):
    """The answer is the whole completion, without the space around it."""

    type: Literal["whole"] = "whole"


class TaggedAnswer(Section):
    """The answer stands in the last `<tag>…</tag>` of the completion."""

    type: Literal["tag"] = "tag"
    tag: Annotated[str, Field(pattern=r"^[A-Za-z_][\w-]*$")] = "answer"


class BoxedAnswer(Section):
    r"""The answer stands in the last `\boxed{…}` of the completion."""

    type: Literal["boxed"] = "boxed"


class RegexAnswer(Section):
    """The answer is the first group of the last match of a regular expression.

    As in Python, `.` stops at the end of a line unless the pattern begins with `(?s)`.
    """

    type: Literal["regex"] = "regex"
    pattern: str

    @model_validator(mode="after")
    def _has_a_group(self) -> Self:
        try:
            num_groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(
                f"pattern={self.pattern!r} is no regular expression ({error}); correct it"
            ) from None
        if num_groups == 0:
            raise ValueError(
                f"pattern={self.pattern!r} has no group: put the answer in parentheses"
            )
        return self


AnswerConfig = Annotated[
    WholeAnswer | TaggedAnswer | BoxedAnswer | RegexAnswer, Field(discriminator="type")
]


class RewardSection(Section):
    """What every reward has."""

    name: Text | None = None
    """Under which it is logged (`reward/<name>`); unset: its type, or its function's name."""
    weight: Float = 1.0
    """The sample's reward is the sum of weight x score."""


class TaskReward(RewardSection):
    """The reasoning-gym task's own score of the answer, with part scores for near misses."""

    type: Literal["task"] = "task"


class ExactMatchReward(RewardSection):
    """1 if the answer is the reference answer, else 0."""

    type: Literal["exact_match"] = "exact_match"
    ignore_case: Bool = False


class MathVerifyReward(RewardSection):
    """1 if answer and reference answer are the same mathematical object, else 0."""

    type: Literal["math_verify"] = "math_verify"
    timeout_s: Count = 5


class FunctionReward(RewardSection):
    """The number that a function of yours returns for a `trainer.rl.Sample`."""

    type: Literal["function"] = "function"
    path: FunctionPath
    """`module:function`; the module is imported with the working directory on the path."""
    params: FreeTable = {}
    """Further keyword arguments."""


RewardConfig = Annotated[
    TaskReward | ExactMatchReward | MathVerifyReward | FunctionReward, Field(discriminator="type")
]


class EnvConfig(Section):
    """Prompts, and how completions are scored."""

    source: Source
    """Prompts with reference answers: a row has `messages` or `prompt` (text or turns) or
    `question` (text of one user turn), and `answer` (or `completion`, or a last assistant turn),
    which is not needed where all rewards are functions."""
    shuffle: Bool = True
    system: str | None = None
    """Text of a system turn before conversations that have none."""
    on_bad_row: Literal["error", "skip"] = "error"
    answer: AnswerConfig = WholeAnswer()
    rewards: Annotated[tuple[RewardConfig, ...], Field(min_length=1)] = (TaskReward(),)
    pass_reward: str | None = None
    """The reward whose full score (0.99 or more) is a pass; unset: the first."""
    on_reward_error: Literal["zero", "error"] = "zero"
    """What a reward that raises or returns no finite number does: score 0 with a warning, counted
    in `reward/errors`, or end the run."""

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Names of the rewards, in order."""
        return tuple(reward_name(reward) for reward in self.rewards)

    @model_validator(mode="after")
    def _rewards_fit(self) -> Self:
        names = self.reward_names
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"rewards: {names.count(name)} are named {name!r}; name them apart"
                )
            if name in TAKEN_NAMES or not name:
                raise ValueError(
                    f"rewards: one is named {name!r}, and reward/{name} is a metric of all of them "
                    "together; give it another name"
                )
        if self.pass_reward is not None and self.pass_reward not in names:
            raise ValueError(
                f"pass_reward={self.pass_reward!r} names no reward: choose one of {list(names)}"
            )
        return self

    @model_validator(mode="after")
    def _task_rewards_have_a_task(self) -> Self:
        if any(isinstance(reward, TaskReward) for reward in self.rewards):
            refuse_other_sources(self.source, "env.source")
        return self


class RolloutConfig(Section):
    """How completions are sampled."""

    engine: Literal["local"] = "local"
    """local: the live, sharded model generates; no weights are copied."""
    num_prompts: Count = 16
    """Prompts of a rollout batch, over all ranks."""
    num_samples: Annotated[int, Field(strict=True, ge=2)] = 8
    """Completions of each prompt: a group, whose rewards are compared."""
    max_new_tokens: Count = 256
    temperature: Temperature = 1.0
    top_p: Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0, le=1)] = 1.0
    top_k: CountOrZero = 0
    """0: all tokens."""
    stop_tokens: tuple[str, ...] = ()
    """Tokens that end a completion, besides the tokenizer's end of text."""
    batch_size: Count = 64
    """Completions that a rank decodes at once (at least one group)."""
    num_updates: Count = 1
    """Optimizer steps per rollout batch, each on its own part of the groups; above 1, the later
    ones are off-policy."""
    resample: CountOrZero = 0
    """How often groups whose rewards are all equal are replaced by groups of further prompts."""
    truncated: Literal["keep", "mask", "penalize"] = "keep"
    """Completions that reach max_new_tokens: trained like others, left out of the loss, or
    trained with `truncation_penalty` taken off their reward."""
    truncation_penalty: NonNegativeFloat = 1.0

    @model_validator(mode="after")
    def _updates_divide(self) -> Self:
        if self.num_prompts % self.num_updates:
            raise ValueError(
                f"num_updates={self.num_updates} does not divide num_prompts={self.num_prompts}: "
                "each optimizer step takes as many groups; choose a divisor"
            )
        return self


class LossSection(Section):
    """What every policy loss takes."""

    advantage: Literal["mean", "std", "leave_one_out"] = "mean"
    """Reward less the group's mean; the same over the group's standard deviation; reward less the
    mean of the group's others. Groups of equal rewards give 0."""
    reduction: Literal["token", "sequence"] = "token"
    """Mean over all trained tokens of the step, or over completions of their token means."""
    old_log_probs: Literal["sampler", "trainer"] = "sampler"
    """What the policy ratio is taken to: the sampler's log-probabilities, or the trainer's own
    before the first update of the batch (one more forward pass)."""
    importance: Literal["none", "truncate", "mask"] = "none"
    """What happens to tokens by their ratio trainer / sampler before the update: nothing; the loss
    is weighted with it, at most `importance_high`; or tokens outside the bounds are left out."""
    importance_low: NonNegativeFloat = 0.5
    importance_high: RatioBound = 2.0
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the divergence from the model that the run starts from; 0: no such model."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of an entropy bonus."""

    @model_validator(mode="after")
    def _importance_is_apart(self) -> Self:
        if self.importance == "truncate" and self.old_log_probs == "sampler":
            raise ValueError(
                "importance='truncate' with old_log_probs='sampler': the policy ratio is then "
                "taken to the sampler already, and the correction would count twice; set "
                "loss.old_log_probs = 'trainer'"
            )
        if self.importance_low > self.importance_high:
            raise ValueError(
                f"importance_low={self.importance_low} exceeds importance_high="
                f"{self.importance_high}; exchange them"
            )
        return self


class ClipLossConfig(LossSection):
    """PPO's clipped ratio of each token (GRPO; asymmetric bounds: DAPO)."""

    type: Literal["clip"] = "clip"
    clip_low: OpenFraction = 0.2
    """The ratio counts down to 1 - clip_low."""
    clip_high: RatioBound = 0.2
    """The ratio counts up to 1 + clip_high."""


class CISPOLossConfig(LossSection):
    """Weighted log-likelihood whose weight, the token's ratio, is clipped (MiniMax-M1)."""

    type: Literal["cispo"] = "cispo"
    clip_low: Fraction = 1.0
    """1: no lower bound, as published."""
    clip_high: RatioBound = 4.0


class GSPOLossConfig(LossSection):
    """Clipped ratio of the whole completion: the geometric mean of its tokens' ratios."""

    type: Literal["gspo"] = "gspo"
    clip_low: OpenFraction = 3e-4
    clip_high: RatioBound = 4e-4


LossConfig = Annotated[
    ClipLossConfig | CISPOLossConfig | GSPOLossConfig, Field(discriminator="type")
]


class RLDataConfig(Section):
    """How prompts become tokens and samples become packs."""

    seq_len: Count = 2048
    """Positions of a training pack; prompt and completion must fit."""
    micro_batch_size: Count = 1
    """Packs a forward pass on one rank."""
    overlong: Literal["error", "drop"] = "error"
    """Prompts that leave no room for max_new_tokens in seq_len."""
    tokenizer: PathText | None = None
    """Folder or hub name; unset: the model's own, else the built-in byte-level tokenizer."""
    chat_template: PathText | None = None
    """Path of a Jinja file that replaces the tokenizer's chat template."""
    template_kwargs: FreeTable = {}
    """Variables for the chat template, such as `enable_thinking`."""


class RLValConfig(Section):
    """Held-out prompts, answered greedily."""

    source: Source | None = None
    fraction: OpenFraction = 0.0
    """Part of the prompts held out when no source is given."""
    num_prompts: Count = 128
    """Distinct prompts evaluated, of a mix in turn from each source; all if there are fewer."""
    interval: CountOrZero = 0
    """Every n steps, and at the end; 0: only at the end."""
    at_start: Bool = True

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.source is not None and self.fraction > 0:
            raise ValueError(
                f"source and fraction={self.fraction} are both given: held-out prompts come from "
                "one place; remove one"
            )
        return self


class RLConfig(RunConfig):
    """Reinforcement learning with verifiable rewards."""

    env: EnvConfig
    rollout: RolloutConfig = RolloutConfig()
    loss: LossConfig = ClipLossConfig()
    data: RLDataConfig = RLDataConfig()
    val: RLValConfig = RLValConfig()

    @model_validator(mode="after")
    def _completions_fit(self) -> Self:
        if self.rollout.max_new_tokens >= self.data.seq_len:
            raise ValueError(
                f"rollout.max_new_tokens={self.rollout.max_new_tokens} leaves no room for a prompt "
                f"in data.seq_len={self.data.seq_len}: raise seq_len"
            )
        return self

    @model_validator(mode="after")
    def _held_out_prompts_have_a_task(self) -> Self:
        has_task = any(isinstance(reward, TaskReward) for reward in self.env.rewards)
        if has_task and self.val.source is not None:
            refuse_other_sources(self.val.source, "val.source")
        return self


def reward_name(reward: RewardConfig) -> str:
    """Return the name under which a reward is logged."""
    if reward.name is not None:
        return reward.name
    return reward.path.partition(":")[2] if isinstance(reward, FunctionReward) else reward.type


def refuse_other_sources(source: Source, field: str) -> None:
    """Refuse a task's reward where prompts come from no task."""
    parts: Sequence[Any] = source.sources if isinstance(source, MixSource) else (source,)
    others = sorted({part.type for part in parts if not isinstance(part, ReasoningGymSource)})
    if others:
        raise ValueError(
            f"a reward of type 'task' needs reasoning_gym prompts, but {field} has type "
            f"{others[0]!r}: give env.rewards of type 'exact_match', 'math_verify' or 'function'"
        )
