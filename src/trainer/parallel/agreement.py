"""Ranks that agree on the host: one rank's failure becomes the same failure on all.

Owns small collectives over host objects. Does not own start-up or teardown of the process group
(`trainer.parallel.world`). Read `trainer.checkpoint.store` for the pattern in use.
"""

from collections.abc import Callable
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from trainer.errors import UserError

T = TypeVar("T")


class Ranks:
    """All ranks of the run, for objects and decisions on the host.

    Args:
        group: The process group; None: the default one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    @classmethod
    def with_own_group(cls) -> Self:
        """Return ranks over a gloo group of their own, which a background thread may use.

        Collective: creates a group; every rank must call, in the same order as other groups.
        """
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup), "every rank is in the group of all"
        return cls(group)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank. Collective: all ranks, one all-gather."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def is_any(self, fact: bool) -> bool:
        """Return whether a fact holds on any rank. Collective: all ranks, one all-reduce."""
        # A script may have started its group with NCCL alone.
        has_cpu = "cpu:" in dist.get_backend_config(self.group)
        flag = torch.tensor(fact, dtype=torch.int32, device="cpu" if has_cpu else "cuda")
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.group)
        return bool(flag)

    def agree(self, error: str | None, kind: type[Exception] = RuntimeError) -> None:
        """Raise the same `kind` on every rank if any rank has an error.

        The message names the ranks, unless all say the same.

        Raises:
            kind: some rank's `error` is not None.

        Collective: all ranks, one all-reduce of a flag; where it is set, one all-gather.
        """
        if not self.is_any(error is not None):
            return
        by_message: dict[str, list[int]] = {}
        for rank, message in enumerate(self.gather(error)):
            if message is not None:
                by_message.setdefault(message, []).append(rank)
        if len(by_message) == 1 and (len(next(iter(by_message.values()))) == self.size):
            raise kind(next(iter(by_message)))
        raise kind(
            "; ".join(f"rank {_listed(ranks)}: {text}" for text, ranks in by_message.items())
        )

    def together(self, function: Callable[[], T]) -> T:
        """Return `function()`, run on every rank; a user's error on any is raised on all.

        Raises:
            UserError: `function` raised it on some rank.

        Collective: all ranks, as `agree`, after `function`.
        """
        results: list[T] = []
        error = None
        try:
            results.append(function())
        except UserError as refusal:
            error = str(refusal)
        self.agree(error, UserError)
        return results[0]

    def on_first(self, function: Callable[[], T], *failures: type[Exception]) -> T:
        """Return rank 0's `function()` on every rank; a failure there is raised on all.

        Args:
            function: What only rank 0 may do; its result is sent to the others.
            failures: Exceptions to pass on; they are raised on each rank with their own type.

        Collective: all ranks, one broadcast.
        """
        outcome: list[Any] = [None, None]
        if self.is_first:
            try:
                outcome[0] = function()
            except failures as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
