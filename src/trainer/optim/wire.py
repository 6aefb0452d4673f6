"""The form in which slabs travel and stacks are built: scaled by a power of two, in `ns_dtype`.

Owns the exact scaling and the layout of messages. A slab's message is one row of a 2-D buffer: its
values, scaled so that the largest lies in [0.5, 1), then the exponent that was taken out. Sending
is in `exchange.py`.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

TAIL = 8
"""Elements behind a slab's values: the exponent, and padding that keeps rows 16-byte aligned."""

ZERO_EXPONENT = -200
"""Exponent of an all-zero slab: under any other, and exact in bfloat16 and float16."""

MAX_EXPONENT = 126
"""The largest power of two whose reciprocal is a normal float32 too."""


def scale_into_(u_BMN: Tensor, out_BMN: Tensor) -> Tensor:
    """Write each matrix divided by a power of two into `out_BMN`; return the exponents.

    The division is exact, then values are rounded once to the dtype of `out_BMN`. So no dtype
    overflows, and nothing underflows that matters beside the matrix's largest entry. At the ends of
    float32 the power stops at 2^126 either way, and with it the exponent returned.

    Args:
        u_BMN: Matrices or slabs, any float dtype; not modified.
        out_BMN: Receives them with the largest magnitude of each in [0.5, 1), at the ends of
            float32 from 2^-23 to below 4.

    Returns:
        int32 exponents, shape [B]: the powers divided by; `ZERO_EXPONENT` for zeros.
    """
    exponents_B = _exponents(u_BMN)
    factors_B = _power_of_two(exponents_B.neg())
    torch.mul(u_BMN, factors_B[:, None, None], out=out_BMN)
    return exponents_B


def _exponents(u_BMN: Tensor) -> Tensor:
    if u_BMN.numel() == 0:
        return torch.full((len(u_BMN),), ZERO_EXPONENT, dtype=torch.int32, device=u_BMN.device)
    largest_B = torch.linalg.vector_norm(u_BMN, float("inf"), dim=(1, 2)).float()
    exponents_B = torch.frexp(largest_B).exponent.clamp(-MAX_EXPONENT, MAX_EXPONENT)
    return torch.where(largest_B == 0, ZERO_EXPONENT, exponents_B)


def _power_of_two(exponents_B: Tensor) -> Tensor:
    """Return float32 powers of two, exact; exponents beyond +-126 count as +-126."""
    bits = (exponents_B.clamp(-MAX_EXPONENT, MAX_EXPONENT).to(torch.int32) + 127) << 23
    return bits.view(torch.float32)


def pack(
    u_segments: Iterable[Tensor], count: int, shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """Write slabs into a message buffer [B, rows * cols + TAIL], one row a slab.

    Args:
        u_segments: Slabs in order, each segment [local_B, rows, cols]; taken one by one, so that
            only one need exist at a time. At least one.
        count: Slabs in all (B).
        shape: Rows and columns of a slab.
        dtype: Of the wire.
    """
    rows, cols = shape
    message, first = None, 0
    for u_BMN in u_segments:
        if message is None:
            message = u_BMN.new_empty(count, rows * cols + TAIL, dtype=dtype)
        part = message[first : first + len(u_BMN)]
        if rows * cols:
            exponents_B = scale_into_(u_BMN, part[:, : rows * cols].unflatten(1, shape))
        else:
            exponents_B = _exponents(u_BMN)
        part[:, rows * cols :] = exponents_B[:, None]
        first += len(u_BMN)
    assert message is not None
    assert first == count
    return message


def unpack(blocks: Sequence[Tensor], shapes: Sequence[tuple[int, int]], split_dim: int) -> Tensor:
    """Join the slabs of each matrix into a stack [B, M, N] in the wire's dtype.

    Slabs came with exponents of their own; each is brought to its matrix's largest exponent, so
    that a matrix is joined as its single owner would have scaled it, without over- or underflow.

    Args:
        blocks: For each sender, its messages [B, rows * cols + TAIL].
        shapes: For each sender, rows and columns of its slabs.
        split_dim: 0: slabs are rows of the matrix; 1: columns.
    """
    exponents_SB = torch.stack(
        [b[:, r * c].float() for b, (r, c) in zip(blocks, shapes, strict=True)]
    ).to(torch.int32)
    factors_SB = _power_of_two(exponents_SB - exponents_SB.amax(0))
    sizes = [shape[split_dim] for shape in shapes]
    full = [sum(sizes), shapes[0][1]] if split_dim == 0 else [shapes[0][0], sum(sizes)]
    stack_BMN = blocks[0].new_empty(len(blocks[0]), *full)
    targets = stack_BMN.split(sizes, dim=1 + split_dim)
    for block, shape, factors_B, target in zip(blocks, shapes, factors_SB, targets, strict=True):
        if target.numel():
            values = block[:, : shape[0] * shape[1]].unflatten(1, shape)
            torch.mul(values, factors_B[:, None, None], out=target)
    return stack_BMN


def build_stack(
    u_segments: Iterable[Tensor], count: int, shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """Write whole matrices into a stack [B, M, N] of `dtype`, scaled unless that is float32.

    The exponents are dropped: orthogonalization does not depend on a matrix's scale. Arguments
    are `pack`'s.
    """
    stack_BMN, first = None, 0
    for u_BMN in u_segments:
        if stack_BMN is None:
            stack_BMN = u_BMN.new_empty(count, *shape, dtype=dtype)
        out_BMN = stack_BMN[first : first + len(u_BMN)]
        if u_BMN.dtype == torch.float32 == dtype:
            out_BMN.copy_(u_BMN)
        else:
            scale_into_(u_BMN, out_BMN)
        first += len(u_BMN)
    assert stack_BMN is not None
    assert first == count
    return stack_BMN
