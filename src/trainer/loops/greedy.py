"""Greedy answers to held-out questions: samples to look at, and how many are exactly right."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from trainer.data import HeldOut
from trainer.loops.run import Run
from trainer.model.generate import generate_greedily

BATCH = 128
"""Prompts a rank decodes at once."""


@dataclass(frozen=True)
class GreedyResult:
    """Answers in the order of the questions, and the part of them that is exactly right."""

    answers: list[str]
    exact_match: float


def answer_greedily(run: Run, questions: Sequence[HeldOut], max_new_tokens: int) -> GreedyResult:
    """Answer every question with the model as it is.

    Raises:
        Interrupted: a signal asked for an end.

    Collective: questions are dealt over ranks; each batch is decoded by all ranks in step, after
    `Run.stop_if_asked`; one all-gather of the answers.
    """
    own: list[str] = []
    per_round = BATCH * run.world.size
    for start in range(0, len(questions), per_round):
        run.stop_if_asked()
        dealt = questions[start : start + per_round][run.world.rank :: run.world.size]
        own += _decode(run, dealt or questions[:1], max_new_tokens)[: len(dealt)]
    by_rank: list[list[str]] = [[] for _ in range(run.world.size)]
    dist.all_gather_object(by_rank, own)
    answers = [by_rank[i % run.world.size][i // run.world.size] for i in range(len(questions))]
    right = sum(
        answer == question.answer for answer, question in zip(answers, questions, strict=True)
    )
    return GreedyResult(answers, right / len(questions))


def _decode(run: Run, questions: Sequence[HeldOut], max_new_tokens: int) -> list[str]:
    tokenizer, eos_id = run.tokenizer, run.tokenizer.eos_token_id
    assert isinstance(eos_id, int)
    generated = generate_greedily(
        run.model,
        [question.prompt_ids for question in questions],
        max_new_tokens=max_new_tokens,
        eos_id=eos_id,
        pad_id=run.pad_id,
        device=run.device,
    )
    return [text.strip() for text in tokenizer.batch_decode(generated, skip_special_tokens=True)]


def samples_text(title: str, questions: Sequence[HeldOut], result: GreedyResult, count: int) -> str:
    """Return a few questions with the model's answer and the right one, for people."""
    lines = [f"{title}: exact match {result.exact_match:.3f} on {len(questions)} held-out items"]
    for question, answer in list(zip(questions, result.answers, strict=True))[:count]:
        mark = "right" if answer == question.answer else f"wrong, it is {question.answer!r}"
        lines.append(f"  {question.question!r} -> {answer!r} ({mark})")
    return "\n".join(lines)
