"""The `parallel` section: how ranks split replicas, shards and experts."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from trainer.config.base import Bool, Count, Section


class ParallelConfig(Section):
    """`dp_replicate x dp_shard` is the world size; `ep` divides `dp_shard`."""

    dp_replicate: Count = 1
    """Copies of the sharded model."""
    dp_shard: Annotated[int, Field(strict=True, ge=-1)] = -1
    """-1: what `dp_replicate` leaves of the world."""
    ep: Count = 1
    """Ranks that split the experts among them."""
    reshard_after_forward: Bool = True
    """false: keep gathered weights for the backward: more memory, less traffic."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU where there is one."""
    timeout_s: Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0, le=1e8)] = 600.0
    """A collective that takes longer ends the run, naming rank and phase."""

    @model_validator(mode="after")
    def _ep_divides(self) -> Self:
        if self.dp_shard == 0:
            raise ValueError("dp_shard=0: give a positive size, or -1 for what is left")
        if self.dp_shard > 0 and self.dp_shard % self.ep:
            raise ValueError(
                f"ep={self.ep} does not divide dp_shard={self.dp_shard}: "
                "choose an ep that divides dp_shard"
            )
        return self
