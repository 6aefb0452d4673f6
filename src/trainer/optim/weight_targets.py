"""Which chunks are applied to their weights within the last product, and where those weights are.

Owns that question, for the step and for its price. The product is `kernels/weight_update.py`; every
other chunk is applied by a pass of its own, `chunk_passes.py`.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from trainer.optim.bucket import Bucket, Chunk
from trainer.optim.flight import Flight, StepInputs, weight_of
from trainer.optim.kernels.products import Target
from trainer.optim.kernels.select import KernelChoice

MIN_ELEMENTS = 2**23
"""Of a parameter's matrices in a chunk, on average. Each parameter is a launch of its own, which
takes the host longer than smaller products take the device."""

_ALIGNMENT = 16
"""Bytes; weights are copied as bulks of them."""


def is_updated_in_product(
    bucket: Bucket, chunk: Chunk, kernel: KernelChoice, *, is_cautious: bool
) -> bool:
    """Tell whether a chunk's last product can update the weights that its rank holds.

    Args:
        bucket: Of the chunk.
        chunk: What is orthogonalized at a time.
        kernel: The bucket's.
        is_cautious: `cautious_wd`, which looks at each element of an update first.
    """
    if not kernel.fuses_update or is_cautious or bucket.is_exchanged or bucket.dtype != "float32":
        return False
    segments = bucket.segments(chunk.start, chunk.stop)
    elements = (chunk.stop - chunk.start) * bucket.rows * bucket.cols
    return bool(segments) and elements >= len(segments) * MIN_ELEMENTS


def find_targets(flight: Flight, inputs: StepInputs, kernel: KernelChoice) -> list[Target] | None:
    """Return the weights that a chunk's last product updates; None: its update is applied apart.

    That is so on steps that collect statistics, too: they want to see the update, which is then
    rounded to the iteration's dtype before it is applied.
    """
    group = inputs.groups[flight.bucket.group]
    is_asked_for = is_updated_in_product(
        flight.bucket, flight.chunk, kernel, is_cautious=group["cautious_wd"]
    )
    if not is_asked_for or inputs.stats is not None:
        return None
    segments = flight.bucket.segments(flight.chunk.start, flight.chunk.stop)
    weights = [weight_of(segment, group, inputs) for segment in segments]
    if not all(_fits(weights_BMN) for weights_BMN in weights):
        return None
    step_size = float(group["lr"]) * flight.bucket.lr_scale
    kept = 1 - float(group["lr"]) * float(group["weight_decay"])
    gates = [inputs.gates[segment.piece.parameter] for segment in segments]
    device = weights[0].device
    # Mostly one gate for all.
    factors = {id(gate): _gated(gate, kept, step_size, device) for gate in _distinct(gates)}
    return [
        Target(weights_BMN, *factors[id(gate)])
        for weights_BMN, gate in zip(weights, gates, strict=True)
    ]


def _distinct(gates: Sequence[Tensor | None]) -> list[Tensor | None]:
    return list({id(gate): gate for gate in gates}.values())


def _gated(
    gate: Tensor | None, kept: float, step_size: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return both factors on the device, 1 and 0 behind a gate that is shut: float32 [1] each."""
    # Of a number, whatever torch's default dtype.
    full = partial(torch.full, (1,), dtype=torch.float32, device=device)
    if gate is None:
        return full(kept), full(step_size)
    is_open = gate.reshape(1)
    return torch.where(is_open, full(kept), full(1.0)), torch.where(
        is_open, full(step_size), full(0.0)
    )


def _fits(weights_BMN: Tensor) -> bool:
    """Tell whether every matrix is contiguous and aligned."""
    is_dense = weights_BMN.stride()[1:] == (weights_BMN.shape[2], 1)
    is_aligned = weights_BMN.data_ptr() % _ALIGNMENT == 0
    return is_dense and is_aligned and 4 * weights_BMN.stride(0) % _ALIGNMENT == 0
