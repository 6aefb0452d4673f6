"""The elementwise passes over a chunk: by table where there is one, else tensor by tensor.

Owns the choice between the two, which compute the same. Tensor by tensor is `passes.py` with
`wire.py`; by table is `kernels/matrix_table.py`. When a pass runs is `pipeline.py`'s.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from trainer.optim.flight import Flight, StepInputs, gradient_of, momentum_of, weight_of
from trainer.optim.passes import apply_updates_, directions, update_momentum_
from trainer.optim.wire import build_stack, pack


def update_chunk_momentum_(flight: Flight, inputs: StepInputs) -> None:
    """M <- mu * m + g for every matrix of the chunk."""
    group = inputs.groups[flight.bucket.group]
    if flight.table is not None:
        flight.kept_BP = flight.table.update_momentum_(
            mu=float(group["mu"]),
            nesterov=group["nesterov"],
            keep="squares" if flight.groups.shards is None else "largest",
        )
        return
    segments = flight.bucket.segments(flight.chunk.start, flight.chunk.stop)
    update_momentum_(
        [momentum_of(s, group, inputs) for s in segments],
        [gradient_of(s, group, inputs) for s in segments],
        [inputs.gates[s.piece.parameter] for s in segments],
        group["mu"],
    )


def stack_share(flight: Flight, inputs: StepInputs, dtype: torch.dtype) -> Tensor:
    """Return the whole matrices of this replica's share, [B, M, N] of `dtype`.

    By table they come out normalized, and the flight says so.
    """
    shape = flight.bucket.rows, flight.bucket.cols
    if flight.table is None or flight.kept_BP is None:
        return build_stack(_directions(flight, inputs), flight.share_size, shape, dtype)
    group = inputs.groups[flight.bucket.group]
    flight.is_normalized = True
    return flight.table.normalized_stack(
        flight.kept_BP,
        flight.shared_lines,
        shape,
        dtype,
        mu=float(group["mu"]),
        nesterov=group["nesterov"],
    )


def pack_share(flight: Flight, inputs: StepInputs, dtype: torch.dtype) -> Tensor:
    """Return the message of this replica's share: [slabs, elements + TAIL] of `dtype`."""
    if flight.table is None or flight.kept_BP is None:
        shape = flight.bucket.local_matrix_shape
        return pack(_directions(flight, inputs), flight.share_size, shape, dtype)
    group = inputs.groups[flight.bucket.group]
    return flight.table.message(
        flight.kept_BP,
        flight.shared_lines,
        dtype,
        mu=float(group["mu"]),
        nesterov=group["nesterov"],
    )


def apply_chunk_update_(flight: Flight, first: int, update_BMN: Tensor, inputs: StepInputs) -> None:
    """Apply the update of consecutive matrices to their weights.

    Args:
        flight: Their chunk.
        first: The first of them, counted over the bucket.
        update_BMN: [B, local rows, local cols], not empty.
        inputs: What is updated.
    """
    group = inputs.groups[flight.bucket.group]
    stop = first + len(update_BMN)
    step_size = float(group["lr"]) * flight.bucket.lr_scale
    decay = float(group["lr"]) * float(group["weight_decay"])
    if flight.table is not None and update_BMN.is_contiguous() and not group["cautious_wd"]:
        flight.table.apply_(
            update_BMN,
            slice(first - flight.chunk.start, stop - flight.chunk.start),
            decay=decay,
            step_size=step_size,
        )
        return
    segments = flight.bucket.segments(first, stop)
    apply_updates_(
        [weight_of(s, group, inputs) for s in segments],
        update_BMN.split([s.stop - s.start for s in segments]),
        [inputs.gates[s.piece.parameter] for s in segments],
        step_size=step_size,
        decay=decay,
        cautious=group["cautious_wd"],
    )


def _directions(flight: Flight, inputs: StepInputs) -> Iterator[Tensor]:
    segments = flight.bucket.segments(*flight.share)
    group = inputs.groups[flight.bucket.group]
    return directions(
        [momentum_of(s, group, inputs) for s in segments],
        [gradient_of(s, group, inputs) for s in segments],
        [inputs.gates[s.piece.parameter] for s in segments],
        group["mu"],
        nesterov=group["nesterov"],
    )
