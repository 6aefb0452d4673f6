"""From a completion to the record of a sample: its text, its answer, what it earned.

Owns what a reward function is given and the penalty of truncated completions. Rewards and their
failures are `trainer.rl.scoring`'s; groups are compared in `collect.py`.
"""

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerFast

from trainer.config import RLConfig
from trainer.loops.rl.prompts import Prompt
from trainer.rl.answers import build_extractor
from trainer.rl.engine import Completion
from trainer.rl.rewards import Sample
from trainer.rl.rollouts import Rollout
from trainer.rl.scoring import Scorer


class Judge:
    """Scores completions.

    Args:
        config: Of the run.
        tokenizer: Decodes completions.
        scorer: Rewards.
    """

    def __init__(
        self, config: RLConfig, tokenizer: PreTrainedTokenizerFast, scorer: Scorer
    ) -> None:
        self._rollout = config.rollout
        self._tokenizer = tokenizer
        self._extract: Callable[[str], str | None] = build_extractor(config.env.answer)
        self._scorer = scorer

    def judge(self, prompt: Prompt, completion: Completion) -> Rollout:
        """Return the record of a completion, still without group and advantage.

        Raises:
            UserError: a reward failed and failures end the run.
        """
        text = self._text(completion)
        sample = Sample(
            question=prompt.question,
            reference=prompt.reference,
            completion=text,
            answer=self._extract(text),
            row=prompt.row,
            where=prompt.where,
            score_task=prompt.score_task,
            num_tokens=len(completion.ids),
            is_truncated=completion.is_truncated,
        )
        score = self._scorer.score(sample)
        return Rollout(
            group=0,
            where=prompt.where,
            question=prompt.question,
            prompt=decode(self._tokenizer, prompt.ids),
            completion=text,
            answer=sample.answer,
            reference=prompt.reference,
            reward=score.reward - self._penalty(completion),
            scores=score.parts,
            is_pass=score.is_pass,
            num_errors=score.num_errors,
            advantage=0.0,
            is_truncated=completion.is_truncated,
            version=completion.version,
            prompt_ids=prompt.ids,
            ids=completion.ids,
            log_probs=completion.log_probs,
            source=prompt.source,
        )

    def _text(self, completion: Completion) -> str:
        """Return what was written, without the token that ended it."""
        ids = completion.ids if completion.is_truncated else completion.ids[:-1]
        return decode(self._tokenizer, ids, skip_special_tokens=True)

    def _penalty(self, completion: Completion) -> float:
        is_penalized = completion.is_truncated and self._rollout.truncated == "penalize"
        return self._rollout.truncation_penalty if is_penalized else 0.0


def decode(
    tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], *, skip_special_tokens: bool = False
) -> str:
    """Return the text of token ids."""
    text = tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
    assert isinstance(text, str), "one list of ids is one text"
    return text
