"""How far a run is: the counters that a checkpoint carries."""

from dataclasses import asdict, dataclass
from typing import Self


@dataclass
class Progress:
    """Counters over the whole run, across resumes.

    Attributes:
        step: Steps consumed, skipped ones included; the axis of metrics and checkpoints.
        num_applied: Steps whose update was applied; what the schedule follows.
        num_skipped: Steps skipped for a non-finite loss or gradient.
        skipped_in_row: Of those, the ones since the last applied step.
        num_settled: Steps whose outcome (applied or skipped) is known and counted.
        num_tokens: Tokens seen by the model, padding excluded.
        trained_tokens: Tokens that had a loss.
    """

    step: int = 0
    num_applied: int = 0
    num_skipped: int = 0
    skipped_in_row: int = 0
    num_settled: int = 0
    num_tokens: int = 0
    trained_tokens: int = 0

    def advance(self, num_tokens: int, trained_tokens: int) -> None:
        """Count one step as applied; `settle` corrects it if it was skipped."""
        self.step += 1
        self.num_applied += 1
        self.num_tokens += num_tokens
        self.trained_tokens += trained_tokens

    def settle(self, *, applied: bool) -> None:
        """Take in whether the last step was applied."""
        self.num_settled = self.step
        if applied:
            self.skipped_in_row = 0
            return
        self.num_applied -= 1
        self.num_skipped += 1
        self.skipped_in_row += 1

    def state_dict(self) -> dict[str, int]:
        """Return the counters as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, int]) -> Self:
        """Return the counters that `state_dict` wrote."""
        return cls(**state)
