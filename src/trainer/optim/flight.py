"""A chunk under way through a step, and the parts of parameters that it is made of.

Owns what a step reads and writes (`StepInputs`) and what a chunk holds between its phases
(`Flight`). The phases are `pipeline.py`'s.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainer.optim.bucket import Bucket, Chunk, Segment
from trainer.optim.exchange import Transfer
from trainer.optim.kernels.matrix_table import MatrixTable, Run
from trainer.optim.process_groups import BucketGroups
from trainer.optim.state import as_matrices, local, view_as_matrices
from trainer.optim.stats import UpdateStats


@dataclass(frozen=True)
class StepInputs:
    """What a step reads and writes.

    Attributes:
        parameters: All parameters, as pieces count them.
        momentum: Returns a parameter's momentum, by its index.
        groups: The param groups.
        gates: For each parameter, a 0-d bool that lets its update through; None: open.
        stats: Observes the updates; None on steps that are not asked for.
    """

    parameters: Sequence[Tensor]
    momentum: Callable[[int], Tensor]
    groups: Sequence[dict[str, Any]]
    gates: Sequence[Tensor | None]
    stats: UpdateStats | None


@dataclass
class Flight:
    """A chunk under way: what it is, and what is being exchanged for it."""

    index: int
    bucket: Bucket
    groups: BucketGroups
    chunk: Chunk
    share: tuple[int, int]
    """First matrix of this replica's share, counted over the bucket, and one past the last."""
    table: MatrixTable | None = None
    """Where the chunk's matrices lie; None: they are passed over tensor by tensor."""
    kept_BP: Tensor | None = None
    """What the pass over momentum kept of each matrix of the table."""
    transfer: Transfer | None = None
    stack_BMN: Tensor | None = None
    is_normalized: bool = False
    """Whether the stack's matrices have been divided by their norms."""
    update_BMN: Tensor | None = None
    """Updates of this replica's share: slabs as held here."""

    @property
    def shared_lines(self) -> slice:
        """Lines of the table that are this replica's share."""
        return slice(self.share[0] - self.chunk.start, self.share[1] - self.chunk.start)

    @property
    def share_size(self) -> int:
        """Matrices of this replica's share."""
        return self.share[1] - self.share[0]


def find_runs(flight: Flight, inputs: StepInputs) -> list[Run]:
    """Return where the matrices of a chunk lie; runs of no elements where this rank holds none."""
    flatten = inputs.groups[flight.bucket.group]["flatten"]
    runs = []
    for segment in flight.bucket.segments(flight.chunk.start, flight.chunk.stop):
        piece = segment.piece
        weight = local(inputs.parameters[piece.parameter])
        _, rows, cols = as_matrices(weight, flatten=flatten).shape
        first_row, stop_row = piece.local_rows
        runs.append(
            Run(
                parameter=piece.parameter,
                first=segment.start,
                count=segment.stop - segment.start,
                stride=rows * cols,
                offset=first_row * cols,
                num_elements=(stop_row - first_row) * cols,
            )
        )
    return runs


def slab_shapes(bucket: Bucket) -> list[tuple[int, int]]:
    """Return each shard rank's rows and columns of a matrix."""
    if bucket.split_dim == 0:
        return [(slab, bucket.cols) for slab in bucket.slab_sizes]
    return [(bucket.rows, slab) for slab in bucket.slab_sizes]


def _part(matrices_BMN: Tensor, segment: Segment) -> Tensor:
    return matrices_BMN[segment.start : segment.stop, slice(*segment.piece.local_rows)]


def weight_of(segment: Segment, group: dict[str, Any], inputs: StepInputs) -> Tensor:
    """Return a segment's weights: [B, rows, cols], local."""
    weight = local(inputs.parameters[segment.piece.parameter])
    return _part(view_as_matrices(weight, flatten=group["flatten"]), segment)


def momentum_of(segment: Segment, group: dict[str, Any], inputs: StepInputs) -> Tensor:
    """Return a segment's momentum: [B, rows, cols], local."""
    momentum = local(inputs.momentum(segment.piece.parameter))
    return _part(view_as_matrices(momentum, flatten=group["flatten"]), segment)


def gradient_of(segment: Segment, group: dict[str, Any], inputs: StepInputs) -> Tensor | None:
    """Return a segment's gradient, [B, rows, cols], local; None if the parameter has none here."""
    gradient = inputs.parameters[segment.piece.parameter].grad
    if gradient is None:
        return None
    return _part(as_matrices(local(gradient), flatten=group["flatten"]), segment)
