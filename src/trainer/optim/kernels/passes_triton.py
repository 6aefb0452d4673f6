# pyright: reportMissingImports=false, reportIndexIssue=false
"""The elementwise passes over many matrices in one launch each, for GPUs.

Owns the Triton form of passes.py and of the scaling in wire.py; `device_passes.py` imports it only
where it can run. A matrix is a line of a table of addresses, so that the matrices of a hundred
parameters take one launch. Momentum is one pass (gradient and momentum read, momentum written, each
part's norm kept aside), the stack another (momentum read, scaled values written in the iteration's
dtype), the update the third. `mu`, `decay` and `step_size` are arguments: a schedule recompiles
nothing.
"""

from functools import lru_cache
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.optim.kernels.launches import record_launch

_TILE = 8192
"""Elements that a program takes at a time."""

_MAX_STAGES = 7
_RESERVED_BYTES = 8192
"""Of a multiprocessor's shared memory, for what a pass keeps besides tiles."""

_NUM_PROGRAMS = 1024
"""Programs of a pass, up to twice as many: several for each multiprocessor, so that all end
together, and each with many tiles, since finding a matrix costs loads one after the other."""

_MAX_PARTS = 2 * _NUM_PROGRAMS

# Without fused multiply-adds each product is rounded, as in passes.py.
_OPTIONS = {"num_warps": 16, "enable_fp_fusion": False}

COLUMNS = ("gradient", "momentum", "weight", "gate")
"""Of the table, int64 addresses: fp32 matrices, 16-byte aligned, and a bool; 0: there is none."""

_MAX_EXPONENT = 126
_ZERO_EXPONENT = -200


@triton.jit
def _address(table_ptr, matrix, COLUMN: tl.constexpr):
    return tl.load(table_ptr + matrix * 4 + COLUMN)


@triton.jit
def _matrix_ptr(table_ptr, matrix, COLUMN: tl.constexpr):
    pointer = _address(table_ptr, matrix, COLUMN).to(tl.pointer_type(tl.float32))
    return tl.multiple_of(pointer, 16)


@triton.jit
def _is_open(table_ptr, matrix):
    """A matrix without a gate is open."""
    address = _address(table_ptr, matrix, 3)
    flag = tl.load(address.to(tl.pointer_type(tl.int8)), mask=address != 0, other=1)
    return flag != 0


@triton.jit
def _power_of_two(exponent):
    """Of an int32 in [-126, 127], fp32, exact."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _momentum_kernel(
    table_ptr,
    kept_ptr,
    num_elements,
    mu,
    num_parts,
    NESTEROV: tl.constexpr,
    OF_SQUARES: tl.constexpr,
    STAGES: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """M <- mu * m + g; keep each part's sum of squares, or largest magnitude, of the direction."""
    work = tl.program_id(0)
    matrix, part = (work // num_parts).to(tl.int64), work % num_parts
    m_ptr = _matrix_ptr(table_ptr, matrix, 1)
    g_ptr = _matrix_ptr(table_ptr, matrix, 0)
    has_gradient = _address(table_ptr, matrix, 0) != 0
    is_open = _is_open(table_ptr, matrix)
    total = tl.zeros((TILE,), dtype=tl.float64 if OF_SQUARES else tl.float32)
    for block in tl.range(NUM_BLOCKS, num_stages=STAGES):
        offsets = (part * NUM_BLOCKS + block) * TILE + tl.arange(0, TILE)
        inside = offsets < num_elements
        m = tl.load(m_ptr + offsets, mask=inside, other=0.0)
        g = tl.load(g_ptr + offsets, mask=inside & has_gradient, other=0.0)
        # A shut gate may hold back nan and inf: select, never multiply.
        m = tl.where(is_open, m * mu + g, m)
        tl.store(m_ptr + offsets, m, mask=inside & is_open)
        u = m * mu + g if NESTEROV else m
        if OF_SQUARES:
            wide = u.to(tl.float64)
            total += wide * wide
        else:
            total = tl.maximum(total, tl.abs(u))
    if OF_SQUARES:
        tl.store(kept_ptr + work, tl.sum(total, axis=0))
    else:
        tl.store(kept_ptr + work, tl.max(total, axis=0).to(tl.float64))


@triton.jit
def _direction(table_ptr, matrix, offsets, inside, mu, NESTEROV: tl.constexpr):
    m = tl.load(_matrix_ptr(table_ptr, matrix, 1) + offsets, mask=inside, other=0.0)
    if NESTEROV:
        has_gradient = _address(table_ptr, matrix, 0) != 0
        g_ptr = _matrix_ptr(table_ptr, matrix, 0)
        m = m * mu + tl.load(g_ptr + offsets, mask=inside & has_gradient, other=0.0)
    return m


@triton.jit
def _normalize_kernel(
    table_ptr,
    kept_ptr,
    out_ptr,
    num_elements,
    mu,
    num_parts,
    MAX_PARTS: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
    NESTEROV: tl.constexpr,
    STAGES: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write directions divided by their Frobenius norm; a norm of zero divides by one."""
    work = tl.program_id(0)
    matrix, part = (work // num_parts).to(tl.int64), work % num_parts
    parts = tl.arange(0, MAX_PARTS)
    total = tl.sum(
        tl.load(kept_ptr + matrix * num_parts + parts, mask=parts < num_parts, other=0.0),
        axis=0,
    )
    inverse = 1.0 / tl.sqrt(tl.where(total == 0.0, 1.0, total))
    # The inverse may leave fp32's range, and an fp64 product an element would bound the pass: a
    # power of two in its range, exact, then the rest.
    bits = inverse.to(tl.int64, bitcast=True)
    exponent = ((bits >> 52) & 0x7FF).to(tl.int32) - 1023
    shift = tl.minimum(tl.maximum(exponent, -MAX_EXPONENT), MAX_EXPONENT)
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | (1023 << 52)).to(tl.float64, bitcast=True)
    rest = mantissa.to(tl.float32) * _power_of_two(exponent - shift)
    y_ptr = out_ptr + matrix * num_elements
    for block in tl.range(NUM_BLOCKS, num_stages=STAGES):
        offsets = (part * NUM_BLOCKS + block) * TILE + tl.arange(0, TILE)
        inside = offsets < num_elements
        u = _direction(table_ptr, matrix, offsets, inside, mu, NESTEROV)
        y = (u * _power_of_two(shift)) * rest
        tl.store(y_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _message_kernel(
    table_ptr,
    kept_ptr,
    out_ptr,
    num_elements,
    row_stride,
    mu,
    num_parts,
    MAX_PARTS: tl.constexpr,
    TAIL: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
    ZERO_EXPONENT: tl.constexpr,
    NESTEROV: tl.constexpr,
    STAGES: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write directions divided by 2**e, the largest in [0.5, 1), and e behind them."""
    work = tl.program_id(0)
    matrix, part = (work // num_parts).to(tl.int64), work % num_parts
    parts = tl.arange(0, MAX_PARTS)
    largest = tl.max(
        tl.load(kept_ptr + matrix * num_parts + parts, mask=parts < num_parts, other=0.0),
        axis=0,
    )
    # Every fp32 is a normal fp64, whose exponent bits are frexp's exponent less one.
    bits = largest.to(tl.int64, bitcast=True)
    exponent = ((bits >> 52) & 0x7FF).to(tl.int32) - 1022
    exponent = tl.minimum(tl.maximum(exponent, -MAX_EXPONENT), MAX_EXPONENT)
    factor = _power_of_two(-exponent)
    y_ptr = out_ptr + matrix * row_stride
    for block in tl.range(NUM_BLOCKS, num_stages=STAGES):
        offsets = (part * NUM_BLOCKS + block) * TILE + tl.arange(0, TILE)
        inside = offsets < num_elements
        u = _direction(table_ptr, matrix, offsets, inside, mu, NESTEROV)
        tl.store(y_ptr + offsets, (u * factor).to(out_ptr.dtype.element_ty), mask=inside)
    if part == 0:
        ends = num_elements + tl.arange(0, TAIL)
        sent = tl.where(largest == 0.0, ZERO_EXPONENT, exponent)
        sent = sent.to(tl.float32).to(out_ptr.dtype.element_ty)
        tl.store(y_ptr + ends, tl.zeros((TAIL,), out_ptr.dtype.element_ty) + sent)


@triton.jit
def _update_kernel(
    table_ptr,
    update_ptr,
    num_elements,
    kept,
    step_size,
    num_parts,
    STAGES: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """W <- w * kept - step_size * O."""
    work = tl.program_id(0)
    matrix, part = (work // num_parts).to(tl.int64), work % num_parts
    if _is_open(table_ptr, matrix):
        w_ptr = _matrix_ptr(table_ptr, matrix, 2)
        o_ptr = update_ptr + matrix * num_elements
        for block in tl.range(NUM_BLOCKS, num_stages=STAGES):
            offsets = (part * NUM_BLOCKS + block) * TILE + tl.arange(0, TILE)
            inside = offsets < num_elements
            update = tl.load(o_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
            w = tl.load(w_ptr + offsets, mask=inside, other=0.0)
            tl.store(w_ptr + offsets, w * kept - step_size * update, mask=inside)


def _num_parts(num_matrices: int, num_elements: int) -> int:
    """Return into how many parts a pass cuts each matrix, one a program."""
    num_tiles = triton.cdiv(num_elements, _TILE)
    share = max(1, num_matrices * num_tiles // _NUM_PROGRAMS)
    return triton.cdiv(num_tiles, 1 << (share.bit_length() - 1))


def _num_blocks(num_elements: int, num_parts: int) -> int:
    """Return the tiles of a part: a power of two, since each number is compiled anew."""
    return triton.next_power_of_2(triton.cdiv(triton.cdiv(num_elements, _TILE), num_parts))


@lru_cache
def _num_stages(device: torch.device, read_bytes: int) -> int:
    """Return how many tiles of a pass are under way at a time.

    Loads go ahead into shared memory, which keeps more in flight than registers would: 28 instead
    of 31 ms for the passes of 48 layers (docs/log.md).

    Args:
        device: CUDA, or a CPU under Triton's interpreter, which has no stages.
        read_bytes: What the pass reads an element.
    """
    if device.type != "cuda":
        return 1
    available = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return min(_MAX_STAGES, 1 + (available - _RESERVED_BYTES) // (read_bytes * _TILE))


def launch_momentum(
    table_B4: Tensor,
    num_elements: int,
    *,
    mu: float,
    nesterov: bool,
    keep: Literal["squares", "largest"],
) -> Tensor:
    """Update the momentum of every matrix of a table.

    Args:
        table_B4: int64, columns as `COLUMNS`.
        num_elements: Of each matrix.
        mu: Momentum factor.
        nesterov: Whether what is kept is of mu * m + g.
        keep: The sum of squares of each part of a matrix, or its largest magnitude.

    Returns:
        fp64 [B, parts].
    """
    record_launch("triton.momentum")
    num_parts = _num_parts(len(table_B4), num_elements)
    kept_BP = torch.empty(len(table_B4), num_parts, dtype=torch.float64, device=table_B4.device)
    _momentum_kernel[(kept_BP.numel(),)](
        table_B4,
        kept_BP,
        num_elements,
        mu,
        num_parts,
        NESTEROV=nesterov,
        OF_SQUARES=keep == "squares",
        STAGES=_num_stages(table_B4.device, 4 + 4),
        NUM_BLOCKS=_num_blocks(num_elements, num_parts),
        TILE=_TILE,
        **_OPTIONS,
    )
    return kept_BP


def launch_normalize(
    table_B4: Tensor,
    kept_BP: Tensor,
    out_BMN: Tensor,
    *,
    mu: float,
    nesterov: bool,
) -> None:
    """Write every matrix's direction, divided by its Frobenius norm.

    Args:
        table_B4: As `launch_momentum` took it.
        kept_BP: What it kept, of squares.
        out_BMN: Contiguous, of any float dtype.
        mu: Momentum factor.
        nesterov: As there.
    """
    record_launch("triton.normalize")
    num_parts = kept_BP.shape[1]
    _normalize_kernel[(kept_BP.numel(),)](
        table_B4,
        kept_BP,
        out_BMN,
        out_BMN[0].numel(),
        mu,
        num_parts,
        MAX_PARTS=_MAX_PARTS,
        MAX_EXPONENT=_MAX_EXPONENT,
        NESTEROV=nesterov,
        STAGES=_num_stages(table_B4.device, 4 + 4 * nesterov),
        NUM_BLOCKS=_num_blocks(out_BMN[0].numel(), num_parts),
        TILE=_TILE,
        **_OPTIONS,
    )


def launch_message(
    table_B4: Tensor,
    kept_BP: Tensor,
    message: Tensor,
    tail: int,
    *,
    mu: float,
    nesterov: bool,
) -> None:
    """Write every slab's direction as `wire.pack` does: scaled values, then the exponent.

    Args:
        table_B4: As `launch_momentum` took it.
        kept_BP: What it kept, the largest magnitudes.
        message: [B, elements + tail], contiguous, of the wire's dtype.
        tail: Elements behind the values, a power of two.
        mu: Momentum factor.
        nesterov: As there.
    """
    record_launch("triton.message")
    num_parts = kept_BP.shape[1]
    _message_kernel[(kept_BP.numel(),)](
        table_B4,
        kept_BP,
        message,
        message.shape[1] - tail,
        message.shape[1],
        mu,
        num_parts,
        MAX_PARTS=_MAX_PARTS,
        TAIL=tail,
        MAX_EXPONENT=_MAX_EXPONENT,
        ZERO_EXPONENT=_ZERO_EXPONENT,
        NESTEROV=nesterov,
        STAGES=_num_stages(table_B4.device, 4 + 4 * nesterov),
        NUM_BLOCKS=_num_blocks(message.shape[1] - tail, num_parts),
        TILE=_TILE,
        **_OPTIONS,
    )


def launch_update(
    table_B4: Tensor,
    update_BMN: Tensor,
    *,
    decay: float,
    step_size: float,
) -> None:
    """Apply an update to the weight of every matrix of a table.

    Args:
        table_B4: int64, columns as `COLUMNS`.
        update_BMN: Contiguous, of any float dtype.
        decay: lr * weight_decay.
        step_size: lr * s.
    """
    record_launch("triton.update")
    num_elements = update_BMN[0].numel()
    num_parts = _num_parts(len(table_B4), num_elements)
    _update_kernel[(len(table_B4) * num_parts,)](
        table_B4,
        update_BMN,
        num_elements,
        1 - decay,
        step_size,
        num_parts,
        STAGES=_num_stages(table_B4.device, 4 + update_BMN.element_size()),
        NUM_BLOCKS=_num_blocks(num_elements, num_parts),
        TILE=_TILE,
        **_OPTIONS,
    )
