"""Rows of prompts: what the sources give, and where in a row the reference answer stands.

Owns the forms of a row that RL knows besides those of supervised data, and a task's own scoring.
Sources are `trainer.data.sources`'s; `prompts.py`, read next, makes prompts of rows.
"""

import datetime
import numbers
from collections.abc import Mapping
from functools import partial
from typing import Any

from trainer.config import RLConfig
from trainer.config.data import Source
from trainer.config.rl import ExactMatchReward, MathVerifyReward
from trainer.data.reasoning_gym import ReasoningGymRows
from trainer.data.rows import BadRow
from trainer.data.sources import Rows, open_sources

SCORE_TASK = "\0score_task"
"""Key under which a task's row carries the task's own scoring; no user's column is so named."""


class TaskRows:
    """Items of a reasoning-gym task that carry the task's scoring.

    Args:
        rows: Of the task.
        needs_answers: Whether a reward compares with the reference answer. Without one, items that
            the task can score and gives no answer to are prompts too.
    """

    def __init__(self, rows: ReasoningGymRows, *, needs_answers: bool) -> None:
        self._rows = rows
        self._needs_answers = needs_answers

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        item = self._rows.item(index)
        score = partial(self._rows.task.score_answer, entry=item)
        scored = {"metadata": item["metadata"], SCORE_TASK: score}
        if item["answer"] is None and not self._needs_answers:
            return {"messages": self._rows.question(item), "answer": "", **scored}
        return {**self._rows[index], **scored}

    def where(self, index: int) -> str:
        """Return task, seed and item."""
        return self._rows.where(index)


def open_prompt_rows(source: Source, field: str, config: RLConfig) -> tuple[Rows, ...]:
    """Open a source, or all of a mix; rows of tasks carry their scoring.

    Raises:
        UserError: as `open_sources`.
    """
    rewards = config.env.rewards
    needs_answers = any(isinstance(r, ExactMatchReward | MathVerifyReward) for r in rewards)
    return tuple(
        TaskRows(rows, needs_answers=needs_answers) if isinstance(rows, ReasoningGymRows) else rows
        for rows in open_sources(source, field)
    )


def with_answer(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row in which the reference answer is the last assistant turn or the completion.

    Args:
        raw: `messages`, `prompt` (text or turns) or `question` (text of one user turn), with
            `answer`; or a row of supervised data, whose last answer is the reference.

    Raises:
        BadRow: there is no reference answer.
    """
    row = {name: value for name, value in raw.items() if value is not None and name != SCORE_TASK}
    answer = reference_text(row.pop("answer")) if "answer" in row else None
    if isinstance(row.get("messages"), str):
        raise BadRow("messages", "messages is text: give a list of turns, or the text as 'prompt'")
    if "question" in row and "messages" not in row and "prompt" not in row:
        row["prompt"] = [{"role": "user", "content": row.pop("question")}]
    if answer is None:
        if "messages" not in row and "completion" not in row:
            raise BadRow("no_answer", "the row has no reference answer: give it an 'answer'")
        return row
    if "messages" in row:
        row["prompt"] = row.pop("messages")
    is_text = isinstance(row.get("prompt"), str)
    turn = [{"role": "assistant", "content": answer}]
    return row | {"completion": answer if is_text else turn}


def reference_text(answer: Any) -> str:
    """Return the reference answer that a row gives, as text.

    Raises:
        BadRow: it is no one value, so that nothing could be compared with its text.
    """
    if not isinstance(answer, str | numbers.Number | datetime.date | datetime.time):
        raise BadRow(
            "answer",
            f"answer is a {type(answer).__name__}: give text or a number (what else a reward needs "
            "may stand in a field of another name, and reaches it as sample.row)",
        )
    text = str(answer)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(
            "not_unicode", f"answer={text!r} holds half a surrogate pair: mend the escape"
        ) from error
    return text
