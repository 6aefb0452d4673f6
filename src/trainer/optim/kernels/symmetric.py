"""QuACK's products: `gemm_symmetric` computes one triangle and mirrors it; `gemm` adds in fp32.

Owns Hopper's tiles and the calls into quack-kernels with them; other GPUs' are quack_default.py's.
Whether they can run here is select.py's question. Nothing of QuACK is imported before
`quack_products` is called.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from trainer.optim.kernels.identity import add_identity
from trainer.optim.kernels.launches import record_launch
from trainer.optim.kernels.machine import Capability
from trainer.optim.kernels.products import Products, is_column_major
from trainer.optim.kernels.quack_default import default_products

HOPPER = 9
SUPPORTED_MAJOR_CAPABILITIES = (8, 9, 10, 11, 12)
SUPPORTED_DTYPES = (torch.float16, torch.bfloat16)
MODULES = ("quack.gemm", "quack.gemm_symmetric", "quack.epilogue.frontend", "quack.epilogue.ops")
"""All that the Hopper products import."""

ALIGNMENT = 8
"""Both dims must be multiples of this: QuACK copies 16 bytes at a time."""


_COUNTERS_AT_ONCE = 256

_MIN_DYNAMIC_TILES = 2048
"""Tiles under which each threadblock has its own from the start. A dynamic launch takes the host
some 10 us longer, more than the schedule gains where a product is over soon (16x2048x768 in
bfloat16, gram: 1.12 ms with 512 here, 0.91 all static; one H200, torch 2.11.0+cu130, 2026-11-30,
scripts/bench/newton_schulz.py)."""


@dataclass(frozen=True)
class Tile:
    """One threadblock's share of the output, and how threadblocks cooperate.

    `pingpong`: two warpgroups alternate between tiles, one multiplying while the other stores.
    """

    rows: int
    columns: int
    cluster_rows: int = 1
    cluster_columns: int = 1
    pingpong: bool = True


@dataclass(frozen=True)
class Tiles:
    """The tiles of the Hopper kernels, by product, and how threadblocks come by them.

    `is_dynamic`: a threadblock takes the next tile when it is done with one; False: each has its
    tiles from the start. One H200, torch 2.11.0+cu130, 2026-11-30: 4.83 instead of 5.22 ms for an
    iteration of 128x2048x768, no difference at 64x1536x2048 (docs/log.md).

    Measured on one H200, torch 2.11.0+cu130, quack-kernels 0.6.5, 2026-11-29, as m·m·k TFLOP/s
    (scripts/bench/newton_schulz.py): against QuACK's built-in 128x256 with a cluster of 2,
    128x128 pingpong makes 559 instead of 528 of 16x1536x2048, and 407 instead of 369 of
    16x768x2048; 192x192 makes 622 instead of 591 (128x128) of 1x4096x4096. A cluster must
    cover a square.

    `update`, 2026-12-01: with the pass over the weights that it replaces, 64x1536x2048 takes
    1.43 ms apart and 1.15 together (1.17 with the general tile), 128x2048x768 0.99 and 0.80 (0.94).
    """

    symmetric: Tile = Tile(128, 128)
    symmetric_large: Tile = Tile(192, 192, pingpong=False)
    large_rows: int = 4096
    general: Tile = Tile(128, 192, cluster_rows=2)
    update: Tile = Tile(128, 128, cluster_rows=2)
    is_dynamic: bool = True

    def symmetric_for(self, operand_BMK: Tensor) -> Tile:
        """Return the tile for an M x M result of an operand's rows.

        Of a column-major operand cutlass-dsl 4.8.1 cannot compile 192 rows: the process aborts.
        """
        is_large = operand_BMK.shape[-2] >= self.large_rows
        if is_large and not is_column_major(operand_BMK):
            return self.symmetric_large
        return self.symmetric


@lru_cache
def quack_products(capability: Capability, tiles: Tiles | None = None) -> Products:
    """Import QuACK and return its products for float16 and bfloat16.

    Args:
        capability: of the GPU they will run on. On Hopper the tiles are ours; elsewhere QuACK's.
        tiles: other Hopper tiles, for benchmarks.

    Raises:
        ImportError: quack-kernels, or something that it needs, is missing.
    """
    if capability[0] != HOPPER:
        return default_products()
    return _hopper_products(tiles or Tiles())


def _hopper_products(tiles: Tiles) -> Products:
    from quack.gemm import gemm  # pyright: ignore[reportMissingImports]
    from quack.gemm_symmetric import gemm_symmetric  # pyright: ignore[reportMissingImports]

    from trainer.optim.kernels.weight_update import update_weights_

    launch = _Launch(tiles.is_dynamic)
    return Products(
        gram=partial(_hopper_gram, gemm_symmetric, tiles, launch),
        symmetric=partial(_hopper_symmetric, gemm_symmetric, tiles, launch),
        apply=partial(_hopper_apply, gemm, tiles, launch),
        shift=add_identity,
        halves_symmetric=True,
        update=partial(_hopper_update, update_weights_, tiles, launch),
    )


class _Launch:
    """What a launch takes besides its operands: the tile, and a counter for the dynamic schedule.

    The counter must be zero at every launch: QuACK's symmetric kernel leaves another value behind,
    with which the next launch would skip tiles. Zeroing one at a time would cost a launch for every
    product, so many are zeroed at once, on the stream that uses them.
    """

    def __init__(self, is_dynamic: bool) -> None:
        self._is_dynamic = is_dynamic
        self._unused: dict[tuple[torch.device, int], list[Tensor]] = {}

    def options(self, tile: Tile, out_BMN: Tensor, *, is_symmetric: bool) -> dict[str, Any]:
        """Return the keyword arguments of a launch on the current stream."""
        is_dynamic = (
            self._is_dynamic and _num_tiles(tile, out_BMN, is_symmetric) >= _MIN_DYNAMIC_TILES
        )
        return {
            "tile_count_semaphore": self._zeroed_counter(out_BMN.device) if is_dynamic else None,
            "tile_M": tile.rows,
            "tile_N": tile.columns,
            "cluster_M": tile.cluster_rows,
            "cluster_N": tile.cluster_columns,
            "pingpong": tile.pingpong,
            "persistent": True,
            "is_dynamic_persistent": is_dynamic,
        }

    def _zeroed_counter(self, device: torch.device) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            # A graph's replays need the zeroing inside the graph.
            return torch.zeros(1, dtype=torch.int32, device=device)
        # The default stream has the same handle on every device.
        stream = torch.cuda.current_stream(device).cuda_stream
        unused = self._unused.setdefault((device, stream), [])
        if not unused:
            zeros = torch.zeros(_COUNTERS_AT_ONCE, dtype=torch.int32, device=device)
            unused.extend(zeros.split(1))
        return unused.pop()


def _num_tiles(tile: Tile, out_BMN: Tensor, is_symmetric: bool) -> int:
    num_matrices, rows, columns = out_BMN.shape
    of_a_matrix = -(-rows // tile.rows) * -(-columns // tile.columns)
    return num_matrices * (of_a_matrix // 2 if is_symmetric else of_a_matrix)


def _hopper_gram(
    kernel: Callable[..., object], tiles: Tiles, launch: _Launch, X_BMN: Tensor, out: Tensor
) -> None:
    record_launch("quack.gemm_symmetric")
    tile = tiles.symmetric_for(X_BMN)
    kernel(X_BMN, X_BMN, out, None, **launch.options(tile, out, is_symmetric=True))


def _hopper_symmetric(
    kernel: Callable[..., object],
    tiles: Tiles,
    launch: _Launch,
    A_BMM: Tensor,
    Z_BMM: Tensor,
    C_BMM: Tensor,
    alpha: float,
    beta: float,
    out: Tensor,
) -> None:
    record_launch("quack.gemm_symmetric")
    tile = tiles.symmetric_for(A_BMM)
    # The kernel multiplies by the transpose of its second operand: Z is its own.
    options = launch.options(tile, out, is_symmetric=True)
    kernel(A_BMM, Z_BMM, out, C_BMM, **options, alpha=alpha, beta=beta)


def _hopper_apply(
    kernel: Callable[..., object],
    tiles: Tiles,
    launch: _Launch,
    S_BMM: Tensor,
    X_BMN: Tensor,
    beta: float,
    out: Tensor,
) -> None:
    record_launch("quack.gemm")
    options = launch.options(tiles.general, out, is_symmetric=False)
    if beta != 0.0:
        options["beta"] = beta
    if is_column_major(X_BMN):
        # Xᵀ·S, whose rows are contiguous; S stands for its own transpose.
        addend = X_BMN.mT if beta != 0.0 else None
        kernel(X_BMN.mT, S_BMM, out.mT, addend, **options)
    else:
        addend = X_BMN if beta != 0.0 else None
        kernel(S_BMM, X_BMN, out, addend, **options, b_kn=True)


def _hopper_update(
    update_weights_: Callable[..., None],
    tiles: Tiles,
    launch: _Launch,
    S_BMM: Tensor,
    X_BMN: Tensor,
    beta: float,
    weights_BMN: Tensor,
    kept: Tensor,
    step_size: Tensor,
) -> None:
    options = launch.options(tiles.update, weights_BMN, is_symmetric=False)
    update_weights_(S_BMM, X_BMN, beta, weights_BMN, kept, step_size, options)
