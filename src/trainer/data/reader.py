"""Rows into documents, under the run's policies for rows that cannot be used.

Owns `data.on_bad_row` and `data.overlong`, and the counts of what was left out and why. Knows no
order. Read `stream.py` next.
"""

from collections import Counter

from trainer.config.data import DataConfig
from trainer.data.encode import SampleEncoder
from trainer.data.packing import Document, Sample
from trainer.data.rows import BadRow, Row, parse_row, question_keys
from trainer.data.sources import Rows
from trainer.errors import UserError


class RowReader:
    """Reads rows into documents under the run's policies, counting what it leaves out.

    Args:
        encoder: rows to samples.
        config: the `data` section (`on_bad_row`, `overlong`, `split_samples`, `seq_len`).
        excluded: keys of questions held out for validation; a row that would train an answer to
            one is passed over.
    """

    def __init__(
        self, encoder: SampleEncoder, config: DataConfig, excluded: frozenset[bytes] = frozenset()
    ) -> None:
        self._encoder = encoder
        self._config = config
        self._excluded = excluded
        self.counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        """For each reason for leaving rows out, the first that was, and why."""

    @property
    def num_excluded(self) -> int:
        """Question keys that are passed over."""
        return len(self._excluded)

    @property
    def left_out(self) -> str:
        """An example for each reason why rows were left out, for messages."""
        return "; ".join(self._examples.values())

    def parse(self, rows: Rows, index: int) -> Row | None:
        """Return a row, or None if it is bad and `data.on_bad_row` says skip.

        Raises:
            UserError: it is bad and `data.on_bad_row` says error; names file and line.
        """
        try:
            return parse_row(rows[index])
        except BadRow as error:
            self._on_bad_row(error, rows.where(index))
        return None

    def documents(self, rows: Rows, index: int, source: int = 0) -> list[Document]:
        """Return a row's documents; empty if the row is left out.

        Raises:
            UserError: the row is bad or too long, and the policy says error.
        """
        self.counts["rows"] += 1
        row = self.parse(rows, index)
        if row is None:
            return []
        if self._excluded and not self._excluded.isdisjoint(question_keys(row)):
            self._leave_out("held_out", f"{rows.where(index)}: its question is held out by val")
            return []
        try:
            samples = self._encoder.encode(row)
        except BadRow as error:
            self._on_bad_row(error, rows.where(index))
            return []
        samples = [self._fit(sample, row.weight, rows.where(index)) for sample in samples]
        kept = [Document.from_sample(sample, source) for sample in samples if sample is not None]
        self.counts["samples"] += len(kept)
        return kept

    def _on_bad_row(self, error: BadRow, where: str) -> None:
        if self._config.on_bad_row == "error":
            raise UserError(
                f"{where}: {error} (or set data.on_bad_row = 'skip' to leave such rows out)"
            ) from error
        self._leave_out(f"bad_rows/{error.reason}", f"{where}: {error}")

    def _leave_out(self, reason: str, example: str) -> None:
        self.counts[reason] += 1
        self._examples.setdefault(reason, example)

    def _fit(self, sample: Sample, weight: float, where: str) -> Sample | None:
        """Apply `data.overlong`; None if nothing is left to train."""
        seq_len, whole = self._config.seq_len, sample
        if len(sample) > seq_len and not self._config.split_samples:
            too_long = f"{where}: {len(sample)} tokens exceed data.seq_len={seq_len}"
            match self._config.overlong:
                case "error":
                    raise UserError(
                        f"{too_long}: raise data.seq_len, or set data.overlong = 'drop' or "
                        "'truncate', or data.split_samples = true"
                    )
                case "drop":
                    self._leave_out("overlong/dropped", f"{too_long} and data.overlong='drop'")
                    return None
                case "truncate":
                    self.counts["overlong/truncated"] += 1
                    sample = sample.truncate(seq_len)
        if sample.num_trained == 0:
            self._leave_out("nothing_trained", f"{where}: {_why_untrained(whole, weight, seq_len)}")
            return None
        return sample


def _why_untrained(sample: Sample, weight: float, seq_len: int) -> str:
    if weight == 0:
        return "its weight is 0"
    if sample.num_trained:
        return f"what is trained of it lies behind data.seq_len={seq_len}, where it is truncated"
    return "it has no token with a token before it to predict it from"
