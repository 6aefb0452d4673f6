# pyright: reportMissingImports=false, reportIndexIssue=false
"""The elementwise passes over many matrices in one launch each, for GPUs.

Owns the launches of the kernels in passes_kernels.py; matrix_table.py imports it only where it can
run. A matrix is a line of a table of addresses, so that the matrices of a hundred parameters take
one launch. Momentum is one pass (gradient and momentum read, momentum written, each part's norm
kept aside), the stack another (momentum read, scaled values written in the iteration's dtype), the
update the third. `mu`, `decay` and `step_size` are arguments: a schedule recompiles nothing.
"""

from functools import lru_cache
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from trainer.optim.kernels.launches import record_launch
from trainer.optim.kernels.passes_kernels import (
    message_kernel,
    momentum_kernel,
    normalize_kernel,
    update_kernel,
)
from trainer.optim.wire import MAX_EXPONENT, ZERO_EXPONENT

_TILE = 8192
"""Elements that a program takes at a time."""

_MAX_STAGES = 7
_RESERVED_BYTES = 8192
"""Of a multiprocessor's shared memory, for what a pass keeps besides tiles."""

_NUM_PROGRAMS = 1024
"""Programs of a pass, up to twice as many: several for each multiprocessor, so that all end
together, and each with many tiles, since finding a matrix costs loads one after the other. Other
numbers, and tiles of 1024 to 8192, are within 3 % (one H200, torch 2.11.0+cu130, docs/log.md)."""

_MAX_PARTS = 2 * _NUM_PROGRAMS

# Without fused multiply-adds each product is rounded, as in passes.py.
_OPTIONS = {"num_warps": 16, "enable_fp_fusion": False}

COLUMNS = ("gradient", "momentum", "weight", "gate")
"""Of the table, int64 addresses: fp32 matrices, 16-byte aligned, and a bool; 0: there is none."""


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
    of 31 ms for the passes of 48 layers (one H200, torch 2.11.0+cu130, 2026-11-30, docs/log.md).

    Args:
        device: CUDA, or a CPU under Triton's interpreter, which has no stages.
        read_bytes: What the pass reads an element.
    """
    if device.type != "cuda":
        return 1
    available = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return min(_MAX_STAGES, 1 + (available - _RESERVED_BYTES) // (read_bytes * _TILE))


def _tiling(table_B4: Tensor, num_elements: int, num_parts: int, read_bytes: int) -> dict[str, Any]:
    """Return what every launch says of tiles.

    Args:
        table_B4: The matrices.
        num_elements: Of each.
        num_parts: Into which each is cut.
        read_bytes: What the pass reads an element.
    """
    return {
        "STAGES": _num_stages(table_B4.device, read_bytes),
        "NUM_BLOCKS": _num_blocks(num_elements, num_parts),
        "TILE": _TILE,
        **_OPTIONS,
    }


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
    momentum_kernel[(kept_BP.numel(),)](
        table_B4,
        kept_BP,
        num_elements,
        mu,
        num_parts,
        NESTEROV=nesterov,
        OF_SQUARES=keep == "squares",
        **_tiling(table_B4, num_elements, num_parts, 4 + 4),
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
    record_launch("triton.normalize_by_table")
    num_parts = kept_BP.shape[1]
    normalize_kernel[(kept_BP.numel(),)](
        table_B4,
        kept_BP,
        out_BMN,
        out_BMN[0].numel(),
        mu,
        num_parts,
        MAX_PARTS=_MAX_PARTS,
        MAX_EXPONENT=MAX_EXPONENT,
        NESTEROV=nesterov,
        **_tiling(table_B4, out_BMN[0].numel(), num_parts, 4 + 4 * nesterov),
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
    message_kernel[(kept_BP.numel(),)](
        table_B4,
        kept_BP,
        message,
        message.shape[1] - tail,
        message.shape[1],
        mu,
        num_parts,
        MAX_PARTS=_MAX_PARTS,
        TAIL=tail,
        MAX_EXPONENT=MAX_EXPONENT,
        ZERO_EXPONENT=ZERO_EXPONENT,
        NESTEROV=nesterov,
        **_tiling(table_B4, message.shape[1] - tail, num_parts, 4 + 4 * nesterov),
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
    update_kernel[(len(table_B4) * num_parts,)](
        table_B4,
        update_BMN,
        num_elements,
        1 - decay,
        step_size,
        num_parts,
        **_tiling(table_B4, num_elements, num_parts, 4 + update_BMN.element_size()),
    )
