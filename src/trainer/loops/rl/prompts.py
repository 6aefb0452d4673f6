"""Prompts: from the rows of `env.source` to token ids, in one global order; held-out ones apart.

Owns what a row of prompts may look like and the policies for rows that cannot be used. Sources,
their order and chat templates are `trainer.data`'s; completions are scored in `collect.py`.
"""

import datetime
import logging
import numbers
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerFast

from trainer.config import RLConfig
from trainer.config.data import DataConfig, Source
from trainer.config.rl import ExactMatchReward, MathVerifyReward
from trainer.data.encode import SampleEncoder
from trainer.data.order import RowOrder
from trainer.data.reasoning_gym import ReasoningGymRows
from trainer.data.rows import BadRow, ChatRow, Row, parse_row, question_key, question_text
from trainer.data.sources import Rows, SplitRows, open_sources, single_sources
from trainer.errors import UserError

logger = logging.getLogger(__name__)

SCORE_TASK = "score_task"
"""Key under which a task's row carries the task's own scoring."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt with its reference answer.

    Attributes:
        ids: Tokens that the model is given.
        question: For people.
        reference: The reference answer.
        row: As the source gives it.
        where: File and line, or task and item.
        score_task: The task's own scoring; None for other sources.
        key: Equal for equal questions.
    """

    ids: tuple[int, ...]
    question: str
    reference: str
    row: Mapping[str, Any]
    where: str
    score_task: Callable[[str | None], float] | None
    key: bytes


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


class PromptReader:
    """Reads rows into prompts under the run's policies, counting what it leaves out.

    Args:
        config: Of the run.
        encoder: Renders and tokenizes.
        excluded: Keys of questions that are passed over (those held out).
    """

    def __init__(
        self, config: RLConfig, encoder: SampleEncoder, excluded: frozenset[bytes] = frozenset()
    ) -> None:
        self._config = config
        self._encoder = encoder
        self._excluded = excluded
        self._longest = config.data.seq_len - config.rollout.max_new_tokens
        self.counts: Counter[str] = Counter()

    def read(self, rows: Rows, index: int) -> Prompt | None:
        """Return a row's prompt, None if it is left out.

        Raises:
            UserError: it is bad or too long and the policy says error; names the row.
        """
        where = rows.where(index)
        try:
            raw = rows[index]
            row = parse_row(with_answer(raw))
            if isinstance(row, ChatRow) and not row.question:
                raise BadRow("no_question", "there is no turn to answer: give one")
            row = self._with_system(row)
            ids = self._encoder.prompt_ids(row)
            if not ids:
                raise BadRow("empty_prompt", "prompt='' gives the model nothing: give it text")
        except BadRow as error:
            return self._leave_out_bad(error, where)
        if len(ids) > self._longest:
            return self._leave_out_overlong(len(ids), where)
        key = question_key(row)
        if key in self._excluded:
            self.counts["held_out"] += 1
            return None
        plain = {name: value for name, value in raw.items() if name != SCORE_TASK}
        score_task = raw.get(SCORE_TASK)
        return Prompt(tuple(ids), question_text(row), row.answer, plain, where, score_task, key)

    def _with_system(self, row: Row) -> Row:
        system = self._config.env.system
        if system is None or not isinstance(row, ChatRow) or row.messages[0]["role"] == "system":
            return row
        turn = {"role": "system", "content": system}
        return replace(row, messages=(turn, *row.messages), first_trained=row.first_trained + 1)

    def _leave_out_bad(self, error: BadRow, where: str) -> None:
        if self._config.env.on_bad_row == "error":
            raise UserError(
                f"{where}: {error} (or set env.on_bad_row = 'skip' to leave such rows out)"
            ) from error
        self.counts[f"bad_rows/{error.reason}"] += 1

    def _leave_out_overlong(self, num_tokens: int, where: str) -> None:
        if self._config.data.overlong == "error":
            raise UserError(
                f"{where}: a prompt of {num_tokens} tokens leaves no room for "
                f"rollout.max_new_tokens={self._config.rollout.max_new_tokens} in data.seq_len="
                f"{self._config.data.seq_len}: raise seq_len, or set data.overlong = 'drop'"
            )
        self.counts["overlong"] += 1


class PromptStream:
    """The endless stream of training prompts, the same on every rank.

    Args:
        sources: At least one.
        weights: Relative share of each.
        reader: Rows to prompts.
        seed: Of the shuffle.
        shuffle: False: as the rows lie.
    """

    def __init__(
        self,
        sources: Sequence[Rows],
        weights: Sequence[float],
        reader: PromptReader,
        *,
        seed: int,
        shuffle: bool,
    ) -> None:
        self._sources = sources
        self._reader = reader
        self._order = RowOrder([len(rows) for rows in sources], weights, seed, shuffle)

    def next_prompts(self, num_prompts: int) -> list[Prompt]:
        """Return the next prompts of the global order.

        Raises:
            UserError: a row is bad and the policy says error, or a source has no usable row.
        """
        return [self._next(self._order.next_source()) for _ in range(num_prompts)]

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last prompt taken, as JSON."""
        return self._order.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position."""
        self._order.load_state_dict(state)

    def _next(self, source: int) -> Prompt:
        rows = self._sources[source]
        # Any 2 n - 1 draws in a row hold a whole epoch, wherever they begin.
        for _ in range(2 * len(rows)):
            prompt = self._reader.read(rows, self._order.row(self._order.draw(source)))
            if prompt is not None:
                self._order.keep(source)
                return prompt
        raise UserError(
            f"env.source: none of its {len(rows)} rows can be used ({dict(self._reader.counts)}): "
            "give rows that can, or change env.on_bad_row, data.overlong or data.seq_len"
        )


@dataclass(frozen=True, eq=False)
class Prompts:
    """The prompts of a run: an endless stream to train on, and those held out."""

    train: PromptStream
    held_out: tuple[Prompt, ...]
    description: str


def setup_prompts(config: RLConfig, tokenizer: PreTrainedTokenizerFast) -> Prompts:
    """Open the sources and set held-out prompts apart; reads the held-out rows.

    No question that is held out is trained on, by text.

    Raises:
        UserError: a source is missing or empty, or a held-out row is bad.
    """
    encoder = SampleEncoder(tokenizer, tokenization(config))
    train, validation = _split(config)
    reader = PromptReader(config, encoder)
    held_out = _read_distinct(validation, reader)
    stream = PromptStream(
        train,
        [source.weight for source in single_sources(config.env.source)],
        PromptReader(config, encoder, frozenset(held_out)),
        seed=config.seed,
        shuffle=config.env.shuffle,
    )
    evaluated = tuple(held_out.values())[: config.val.num_prompts]
    num_train = sum(len(rows) for rows in train)
    description = (
        f"{num_train:,} prompts from {len(train)} source(s); {len(held_out):,} distinct ones held "
        f"out, {len(evaluated):,} of them evaluated"
    )
    return Prompts(stream, evaluated, description)


def tokenization(config: RLConfig) -> DataConfig:
    """Return the `data` section of supervised runs that tokenizes as this run asks."""
    return DataConfig(
        source=config.env.source,
        seq_len=config.data.seq_len,
        tokenizer=config.data.tokenizer,
        chat_template=config.data.chat_template,
        template_kwargs=config.data.template_kwargs,
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


def _split(config: RLConfig) -> tuple[tuple[Rows, ...], tuple[Rows, ...]]:
    """Return the sources of training and of held-out prompts."""
    rewards = config.env.rewards
    needs_answers = any(isinstance(r, ExactMatchReward | MathVerifyReward) for r in rewards)
    train = _open(config.env.source, "env.source", needs_answers)
    if config.val.source is not None:
        return train, _open(config.val.source, "val.source", needs_answers)
    if config.val.fraction == 0:
        return train, ()
    kept, held_out = [], []
    for rows in train:
        num = max(1, round(config.val.fraction * len(rows)))
        if num >= len(rows):
            raise UserError(
                f"val.fraction={config.val.fraction} holds out {num} of {len(rows)} prompts and "
                "leaves none for training: give more prompts or a smaller fraction"
            )
        held_out.append(SplitRows(rows, 0, num))
        kept.append(SplitRows(rows, num, len(rows)))
    return tuple(kept), tuple(held_out)


def _open(source: Source, field: str, needs_answers: bool) -> tuple[Rows, ...]:
    return tuple(
        TaskRows(rows, needs_answers=needs_answers) if isinstance(rows, ReasoningGymRows) else rows
        for rows in open_sources(source, field)
    )


def _read_distinct(sources: Sequence[Rows], reader: PromptReader) -> dict[bytes, Prompt]:
    """Return the held-out prompts by key, in the order of their first appearance."""
    found: dict[bytes, Prompt] = {}
    for rows in sources:
        for index in range(len(rows)):
            prompt = reader.read(rows, index)
            if prompt is not None:
                found.setdefault(prompt.key, prompt)
    return found
