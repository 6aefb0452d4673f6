"""Rows of prompts: what the sources give, and where in a row the reference answer stands.

Owns the forms of a row that RL knows besides those of supervised data, and a task's own scoring.
Sources are `trainer.data.sources`'s; `prompts.py`, read next, makes prompts of rows.
"""

import datetime
import numbers
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from trainer.config import RLConfig
from trainer.config.data import (
    FilesSource,
    FunctionSource,
    HubSource,
    MixSource,
    ReasoningGymSource,
    SingleSource,
    Source,
)
from trainer.config.rl import ExactMatchReward, MathVerifyReward
from trainer.data.reasoning_gym import ReasoningGymRows
from trainer.data.rows import BadRow, Row, TextRow, parse_row
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
    return tuple(
        TaskRows(rows, needs_answers=needs_answers(config))
        if isinstance(rows, ReasoningGymRows)
        else rows
        for rows in open_sources(source, field)
    )


def source_names(source: Source) -> list[str]:
    """Return the name of each source of a mix, by which it is logged apart; of one source, ''.

    Equal names get their number in the mix.
    """
    if not isinstance(source, MixSource):
        return [""]
    names = [_own_name(part) for part in source.sources]
    return [
        f"{name}-{index}" if names.count(name) > 1 else name for index, name in enumerate(names)
    ]


def _own_name(source: SingleSource) -> str:
    match source:
        case ReasoningGymSource(task=task):
            return task
        case FilesSource(path=path):
            return Path(path).name
        case HubSource(name=name):
            return name
        case FunctionSource(path=path):
            return path


def needs_answers(config: RLConfig) -> bool:
    """Return whether a reward compares with the reference answer; functions need not."""
    return any(isinstance(r, ExactMatchReward | MathVerifyReward) for r in config.env.rewards)


def read_row(raw: Mapping[str, Any], *, needs_answer: bool) -> Row:
    """Read a row whose last answer is the reference answer.

    Args:
        raw: `messages`, `prompt` (text or turns) or `question` (text of one user turn), with
            `answer`; or a row of supervised data, whose last answer is the reference.
        needs_answer: False: without a reference the row has the empty text for one.

    Raises:
        BadRow: there is no prompt or no reference answer, or they are misshaped.
    """
    row = {name: value for name, value in raw.items() if value is not None and name != SCORE_TASK}
    if "answer" not in row and ("completion" in row or _holds_answer(row.get("messages"))):
        return parse_row(row)
    prompt = _pop_prompt(row)
    if "answer" in row:
        answer = reference_text(row["answer"])
    elif needs_answer:
        raise BadRow("no_answer", "the row has no reference answer: give it an 'answer'")
    else:
        answer = ""
    if isinstance(prompt, str):
        return TextRow(prompt, answer, 1.0)
    completion = [{"role": "assistant", "content": answer}]
    return parse_row(row | {"prompt": prompt, "completion": completion})


def _holds_answer(messages: Any) -> bool:
    """Return whether an assistant's turn is among the turns."""
    turns = messages if isinstance(messages, list | tuple) else ()
    return any(isinstance(turn, Mapping) and turn.get("role") == "assistant" for turn in turns)


def _pop_prompt(row: dict[str, Any]) -> Any:
    """Take what the model is given out of a row: text, or what should be a list of turns."""
    messages, prompt, question = (
        row.pop(name, None) for name in ("messages", "prompt", "question")
    )
    if isinstance(messages, str):
        raise BadRow("messages", "messages is text: give a list of turns, or the text as 'prompt'")
    if messages is not None:
        return messages
    if prompt is not None:
        return prompt
    if question is None:
        raise BadRow(
            "no_prompt",
            f"the row has the fields {sorted(row)}: it needs a 'question', or a 'prompt' or "
            "'messages'",
        )
    if not isinstance(question, str):
        raise BadRow(
            "question",
            f"question={question!r:.80} is a {type(question).__name__}: give text (turns are given "
            "as 'messages')",
        )
    return [{"role": "user", "content": question}]


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
