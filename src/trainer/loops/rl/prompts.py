"""Prompts: from the rows of `env.source` to token ids, in one global order; held-out ones apart.

Owns the policies for rows that cannot be used, and the order. Rows are `prompt_rows.py`'s, chat
templates `trainer.data`'s; completions are scored in `collect.py`.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerFast

from trainer.config import RLConfig
from trainer.config.data import DataConfig
from trainer.data.encode import SampleEncoder
from trainer.data.order import RowOrder
from trainer.data.rows import BadRow, ChatRow, Row, question_key, question_text
from trainer.data.sources import Rows, SplitRows, function_fingerprints, single_sources
from trainer.errors import UserError
from trainer.loops.rl.prompt_rows import (
    SCORE_TASK,
    needs_answers,
    open_prompt_rows,
    read_row,
    source_names,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt with its reference answer.

    Attributes:
        ids: Tokens that the model is given.
        question: For people.
        reference: The reference answer; empty where the row has none and no reward needs one.
        row: As the source gives it.
        where: File and line, or task and item.
        source: Name of its source in a mix; empty without one.
        score_task: The task's own scoring; None for other sources.
        key: Equal for equal questions.
    """

    ids: tuple[int, ...]
    question: str
    reference: str
    row: Mapping[str, Any]
    where: str
    source: str
    score_task: Callable[[str | None], float] | None
    key: bytes


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
        self._needs_answers = needs_answers(config)
        self._longest = config.data.seq_len - config.rollout.max_new_tokens
        self.counts: Counter[str] = Counter()

    def read(self, rows: Rows, index: int, source: str) -> Prompt | None:
        """Return a row's prompt, None if it is left out.

        Args:
            rows: Of a source.
            index: Of the row.
            source: The source's name.

        Raises:
            UserError: it is bad or too long and the policy says error; names the row.
        """
        where = rows.where(index)
        try:
            raw = rows[index]
            row = read_row(raw, needs_answer=self._needs_answers)
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
        question = question_text(row)
        return Prompt(tuple(ids), question, row.answer, plain, where, source, score_task, key)

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
        names: Of each.
        weights: Relative share of each.
        reader: Rows to prompts.
        seed: Of the shuffle.
        shuffle: False: as the rows lie.
        fingerprints: Of the sources that a function makes, by their place: what a position in them
            is worth nothing without.
    """

    def __init__(
        self,
        sources: Sequence[Rows],
        names: Sequence[str],
        weights: Sequence[float],
        reader: PromptReader,
        *,
        seed: int,
        shuffle: bool,
        fingerprints: Mapping[str, str],
    ) -> None:
        self._sources = sources
        self._names = names
        self._reader = reader
        self._fingerprints = dict(fingerprints)
        self._order = RowOrder([len(rows) for rows in sources], weights, seed, shuffle)

    def next_prompts(self, num_prompts: int) -> list[Prompt]:
        """Return the next prompts of the global order.

        Raises:
            UserError: a row is bad and the policy says error, or a source has no usable row.
        """
        return [self._next(self._order.next_source()) for _ in range(num_prompts)]

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last prompt taken, as JSON."""
        own = {"fingerprints": self._fingerprints, "counts": dict(self._reader.counts)}
        return {**self._order.state_dict(), **own}

    @property
    def counts(self) -> Mapping[str, int]:
        """Rows left out so far, by reason."""
        return self._reader.counts

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position.

        Raises:
            UserError: a function makes other rows than when the position was taken.
        """
        position = dict(state)
        if position.pop("fingerprints", {}) != self._fingerprints:
            raise UserError(
                "env.source: its function makes other rows, or in another order, than when the "
                "checkpoint was written, so that the position in them means nothing: make them "
                "depend on params alone (sort what comes from a set), or start a new run"
            )
        self._reader.counts = Counter(position.pop("counts", {}))
        self._order.load_state_dict(position)

    def _next(self, source: int) -> Prompt:
        rows = self._sources[source]
        # Any 2 n - 1 draws in a row hold a whole epoch, wherever they begin.
        for _ in range(2 * len(rows)):
            row = self._order.row(self._order.draw(source))
            prompt = self._reader.read(rows, row, self._names[source])
            if prompt is not None:
                self._order.keep(source)
                return prompt
        raise UserError(
            f"env.source: none of its {len(rows)} rows can be used ({dict(self._reader.counts)}): "
            "give rows that can, or change env.on_bad_row, data.overlong, data.seq_len or [val]"
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
    opened = open_prompt_rows(config.env.source, "env.source", config)
    train, validation = _split(opened, config)
    reader = PromptReader(config, encoder)
    val_names = source_names(config.val.source or config.env.source)
    held_out = _read_distinct(validation, val_names, reader)
    stream = PromptStream(
        train,
        source_names(config.env.source),
        [source.weight for source in single_sources(config.env.source)],
        PromptReader(config, encoder, frozenset(held_out)),
        seed=config.seed,
        shuffle=config.env.shuffle,
        fingerprints=function_fingerprints(opened),
    )
    evaluated = tuple(_in_turn(held_out.values())[: config.val.num_prompts])
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


def _split(opened: tuple[Rows, ...], config: RLConfig) -> tuple[tuple[Rows, ...], tuple[Rows, ...]]:
    """Return the sources of training and of held-out prompts."""
    if config.val.source is not None:
        return opened, open_prompt_rows(config.val.source, "val.source", config)
    if config.val.fraction == 0:
        return opened, ()
    kept, held_out = [], []
    for rows in opened:
        num = max(1, round(config.val.fraction * len(rows)))
        if num >= len(rows):
            raise UserError(
                f"val.fraction={config.val.fraction} holds out {num} of {len(rows)} prompts and "
                "leaves none for training: give more prompts or a smaller fraction"
            )
        held_out.append(SplitRows(rows, 0, num))
        kept.append(SplitRows(rows, num, len(rows)))
    return tuple(kept), tuple(held_out)


def _read_distinct(
    sources: Sequence[Rows], names: Sequence[str], reader: PromptReader
) -> dict[bytes, Prompt]:
    """Return the held-out prompts by key, in the order of their first appearance."""
    found: dict[bytes, Prompt] = {}
    for rows, name in zip(sources, names, strict=False):  # without held-out rows no sources
        for index in range(len(rows)):
            prompt = reader.read(rows, index, name)
            if prompt is not None:
                found.setdefault(prompt.key, prompt)
    return found


def _in_turn(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Return prompts in turn from each source, each in its order."""
    counts: Counter[str] = Counter()
    places = []
    for prompt in prompts:
        places.append((counts[prompt.source], prompt))
        counts[prompt.source] += 1
    return [prompt for _, prompt in sorted(places, key=lambda place: place[0])]
