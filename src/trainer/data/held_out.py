"""Validation rows: which they are, their packs, and questions to answer greedily.

Owns the split and the rule that no question held out is ever trained on, by text: a question is
all that comes before a validation row's last answer, and training passes over every row that would
train an answer to it. So it costs reading the validation rows, not the training rows. Read
`setup.py` next.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.config.data import DataConfig, ValConfig
from trainer.data.encode import SampleEncoder
from trainer.data.packing import Document, Pack, take_best_fit
from trainer.data.reader import RowReader
from trainer.data.rows import Row, question_key, question_text
from trainer.data.sources import Rows, SplitRows, function_fingerprints, open_sources
from trainer.errors import UserError

NUM_MAJORITY_ROWS = 4096
"""Training rows read to find the most common answer."""


@dataclass(frozen=True)
class HeldOut:
    """A question that is never trained on, and its reference answer."""

    prompt_ids: tuple[int, ...]
    answer: str
    question: str


@dataclass(frozen=True, eq=False)
class Split:
    """Sources of training and of validation (none: no validation).

    Attributes:
        fingerprints: Of the sources in `data.source` that a function makes, by their place.
    """

    train: tuple[Rows, ...]
    validation: tuple[Rows, ...]
    fingerprints: dict[str, str]


def split_rows(data: DataConfig, val: ValConfig) -> Split:
    """Open the sources and set validation rows apart.

    Raises:
        UserError: a source cannot be opened, or a fraction leaves no row for training.
    """
    train = open_sources(data.source, "data.source")
    fingerprints = function_fingerprints(train)
    if val.source is not None:
        return Split(train, open_sources(val.source, "val.source"), fingerprints)
    if val.fraction == 0:
        return Split(train, (), fingerprints)
    num_held_out = [max(1, round(val.fraction * len(rows))) for rows in train]
    for rows, num in zip(train, num_held_out, strict=True):
        if num >= len(rows):
            raise UserError(
                f"val.fraction={val.fraction} holds out {num} of {len(rows)} rows and leaves none "
                "for training: give more rows or a smaller fraction"
            )
    pairs = list(zip(train, num_held_out, strict=True))
    return Split(
        tuple(SplitRows(rows, num, len(rows)) for rows, num in pairs),
        tuple(SplitRows(rows, 0, num) for rows, num in pairs),
        fingerprints,
    )


def iterate_rows(sources: Sequence[Rows], reader: RowReader) -> Iterator[Row]:
    """Yield the usable rows of several sources, as they lie."""
    for rows in sources:
        for index in range(len(rows)):
            row = reader.parse(rows, index)
            if row is not None:
                yield row


def held_out_keys(sources: Sequence[Rows], reader: RowReader) -> frozenset[bytes]:
    """Return the key of every validation row's question."""
    return frozenset(question_key(row) for row in iterate_rows(sources, reader))


def pack_rows(
    sources: Sequence[Rows], reader: RowReader, config: DataConfig, max_packs: int | None
) -> list[Pack]:
    """Pack rows once, as they lie.

    Args:
        sources: read one after another.
        reader: rows to documents.
        config: the `data` section.
        max_packs: stop after as many; None: all rows.

    Raises:
        UserError: a row is bad or too long and the policy says error, or none can be used.
    """
    waiting = _pieces(sources, reader, config.seq_len)
    pending: list[Document] = []

    def refill() -> None:
        while len(pending) < config.pack_lookahead:
            document = next(waiting, None)
            if document is None:
                return
            pending.append(document)

    packs: list[Pack] = []
    while max_packs is None or len(packs) < max_packs:
        documents = take_best_fit(pending, refill, config.seq_len)
        if not documents:
            break
        packs.append(Pack(tuple(documents)))
    if sources and not packs:
        raise UserError(
            f"val: none of the validation rows can be used ({reader.left_out}): mend them, or give "
            "others"
        )
    return packs


def _pieces(sources: Sequence[Rows], reader: RowReader, seq_len: int) -> Iterator[Document]:
    for source, rows in enumerate(sources):
        for index in range(len(rows)):
            for document in reader.documents(rows, index, source):
                for start in range(0, len(document), seq_len):
                    yield document.piece(start, start + seq_len)


def pick_held_out(
    sources: Sequence[Rows], reader: RowReader, encoder: SampleEncoder, num_questions: int
) -> tuple[HeldOut, ...]:
    """Return the first `num_questions` distinct questions of the validation rows.

    Raises:
        UserError: there are fewer.
    """
    found: dict[bytes, HeldOut] = {}
    if num_questions:
        for row in iterate_rows(sources, reader):
            held_out = HeldOut(tuple(encoder.prompt_ids(row)), row.answer, question_text(row))
            found.setdefault(question_key(row), held_out)
            if len(found) == num_questions:
                break
    if len(found) < num_questions:
        raise UserError(
            f"val.num_generate={num_questions} exceeds the {len(found)} distinct validation "
            "questions: lower it, or give more through val.source or val.fraction"
        )
    return tuple(found.values())


def majority_rate(
    train: Sequence[Rows], reader: RowReader, held_out: Sequence[HeldOut]
) -> float | None:
    """Return the part of held-out questions that the most common training answer gets right.

    What a model scores that has learnt nothing but that answer. None without held-out questions.
    """
    if not held_out:
        return None
    per_source = max(1, NUM_MAJORITY_ROWS // len(train))
    answers = Counter(
        row.answer
        for rows in train
        for index in range(min(len(rows), per_source))
        if (row := reader.parse(rows, index)) is not None
    )
    majority = max(answers, key=lambda answer: answers[answer], default=None)
    return sum(item.answer == majority for item in held_out) / len(held_out)
