"""Which tiles are fastest for QuACK's products at each shape: the source of `Tiles` in src.

Tiles are compared within the whole iteration: a tile that wins alone can lose there, where what
the products before it left in the caches, and the card's power, are shared.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from timing import time_interleaved
from torch import Tensor

from trainer.optim.kernels import choose_kernel
from trainer.optim.kernels.symmetric import Tile, Tiles, quack_products
from trainer.optim.newton_schulz import newton_schulz

Shape = tuple[int, int, int]
Call = Callable[[int], Tensor]

SQUARES = [
    Tile(128, 128),
    Tile(128, 128, cluster_rows=2, cluster_columns=2),
    Tile(128, 256, cluster_rows=2, pingpong=False),
    Tile(192, 192, pingpong=False),
    Tile(256, 128, cluster_columns=2, pingpong=False),
]
RECTANGLES = [
    Tile(128, 128, cluster_rows=2),
    Tile(128, 160, cluster_rows=2),
    Tile(128, 192),
    Tile(128, 192, cluster_rows=2),
    Tile(128, 208, cluster_rows=2),
    Tile(128, 256, cluster_rows=2, pingpong=False),
    Tile(256, 128, cluster_columns=2, pingpong=False),
    Tile(256, 192, cluster_rows=2, pingpong=False),
]


def search_tiles(
    shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device, seconds: float
) -> list[dict[str, Any]]:
    """Time an iteration with each tile of the symmetric and of the general products.

    Args:
        shapes: Stacks [B, M, N].
        dtype: Of the iteration.
        device: A GPU.
        seconds: Of measuring, for each shape.

    Returns:
        A row for each shape and variant; printed too, fastest first.
    """
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        X_BMN = torch.randn(shape, device=device).to(dtype)
        calls = {}
        for name, tiles in _variants(shape).items():
            call = _call(X_BMN, tiles)
            if _runs(call, name):
                calls[name] = call
        timings = time_interleaved(calls, device, warm_up_s=seconds / 10, measure_s=seconds)
        for name, timing in sorted(timings.items(), key=lambda item: item[1].median_ms):
            rows.append({"shape": list(shape), "tiles": name, **asdict(timing)})
            print(f"{'x'.join(map(str, shape)):<14} {timing.median_ms:8.3f} ms  {name}", flush=True)
    return rows


def _variants(shape: Shape) -> dict[str, Tiles]:
    """Return by name: the tiles in use, those with one exchanged, those on a static schedule."""
    _, M, N = shape
    variants = {"in use": Tiles(), "static schedule": replace(Tiles(), is_dynamic=False)}
    for tile in SQUARES:
        # Tall stacks are column-major operands, of which cutlass-dsl compiles no 192 rows.
        if M <= N or tile.rows != 192:
            variants[f"symmetric {tile}"] = replace(Tiles(), symmetric=tile, symmetric_large=tile)
    for tile in RECTANGLES:
        variants[f"general {tile}"] = replace(Tiles(), general=tile)
    return variants


def _call(X_BMN: Tensor, tiles: Tiles) -> Call:
    num_matrices, M, N = X_BMN.shape
    choice = choose_kernel(
        "auto", shape=(num_matrices, M, N), dtype=X_BMN.dtype, device=X_BMN.device
    )
    capability = torch.cuda.get_device_capability(X_BMN.device)
    tiled = replace(choice, load_products=lambda: quack_products(capability, tiles))
    return lambda _: newton_schulz(X_BMN, kernel=tiled)


def _runs(call: Call, name: str) -> bool:
    """Tell whether tiles compile and launch; QuACK refuses some with errors of many kinds."""
    try:
        call(0)
        torch.cuda.synchronize()
    except (ValueError, RuntimeError, AssertionError, TypeError) as error:
        print(f"{name}: refused, {error}", flush=True)
        return False
    return True
