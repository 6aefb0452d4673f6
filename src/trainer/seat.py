"""This process's seat among all ranks, as the launcher's environment tells it. Imports no torch."""

import os
from dataclasses import dataclass

from trainer.errors import UserError


@dataclass(frozen=True)
class Seat:
    """Rank, ranks in all, and rank on this host."""

    rank: int
    size: int
    local_rank: int

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which speaks for all."""
        return self.rank == 0


def read_seat() -> Seat:
    """Read what torchrun (or SLURM with the same variables) set; without a launcher, the only seat.

    Raises:
        UserError: a variable is missing or not a number, or they contradict each other.
    """
    if "RANK" not in os.environ:
        return Seat(0, 1, 0)
    seat = Seat(_number("RANK"), _number("WORLD_SIZE"), _number("LOCAL_RANK"))
    if seat.rank >= seat.size:
        raise UserError(
            f"RANK={seat.rank} and WORLD_SIZE={seat.size} in the environment: ranks are counted "
            "from 0 and below WORLD_SIZE; launch with torchrun, or correct them"
        )
    return seat


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdigit():
        raise UserError(
            f"{name}={text!r} in the environment: must be a number where RANK is set; "
            "launch with torchrun, or unset RANK for a run of one process"
        )
    return int(text)
