"""Which tiles are fastest for QuACK's products at each shape: the source of `Tiles` in src.

Tiles are compared within the whole iteration: a tile that wins alone can lose there, where what
the products before it left in the caches, and the card's power, are shared.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from timing import time_interleaved
from torch import Tensor

from trainer.optim.kernels import choose_kernel
from trainer.optim.kernels.machine import Capability
from trainer.optim.kernels.products import Products, torch_products
from trainer.optim.kernels.symmetric import Tile, Tiles, quack_products
from trainer.optim.newton_schulz import newton_schulz

Shape = tuple[int, int, int]
Call = Callable[[int], Tensor]
LoadProducts = Callable[[], Products]

SEED_TILE = Tile(128, 256, cluster_rows=2, pingpong=False)
"""QuACK's built-in one, which `quack_seed` has."""

SQUARES = [
    Tile(128, 128),
    Tile(128, 128, cluster_rows=2, cluster_columns=2),
    SEED_TILE,
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
    shape: Shape, dtype: torch.dtype, device: torch.device, seconds: float
) -> list[dict[str, Any]]:
    """Time an iteration with each tile of the symmetric and of the general products.

    Args:
        shape: Of a stack [B, M, N].
        dtype: Of the iteration.
        device: A GPU.
        seconds: Of measuring.

    Returns:
        A row for each variant, fastest first; printed too.
    """
    X_BMN = torch.randn(shape, device=device).to(dtype)
    calls = {}
    for name, load_products in _variants(shape, torch.cuda.get_device_capability(device)).items():
        call = _call(X_BMN, load_products)
        if _runs(call, name):
            calls[name] = call
    timings = time_interleaved(calls, device, warm_up_s=seconds / 10, measure_s=seconds)
    rows: list[dict[str, Any]] = []
    for name, timing in sorted(timings.items(), key=lambda item: item[1].median_ms):
        rows.append({"shape": list(shape), "tiles": name, **asdict(timing)})
        print(f"{'x'.join(map(str, shape)):<14} {timing.median_ms:8.3f} ms  {name}", flush=True)
    return rows


def _variants(shape: Shape, capability: Capability) -> dict[str, LoadProducts]:
    """Return by name: the products in use, those with one thing exchanged, and the seed's."""
    _, M, N = shape
    quack = partial(quack_products, capability)
    seed = Tiles(symmetric=SEED_TILE, symmetric_large=SEED_TILE, is_dynamic=False)
    variants: dict[str, LoadProducts] = {
        "in use": partial(quack, Tiles()),
        "static schedule": partial(quack, Tiles(is_dynamic=False)),
        "general by torch": partial(_general_by_torch, partial(quack, Tiles())),
        "as quack_seed": partial(_general_by_torch, partial(quack, seed)),
    }
    for tile in SQUARES:
        # Tall stacks are column-major operands, of which cutlass-dsl compiles no 192 rows.
        if M <= N or tile.rows != 192:
            tiles = Tiles(symmetric=tile, symmetric_large=tile)
            variants[f"symmetric {_describe(tile)}"] = partial(quack, tiles)
    for tile in RECTANGLES:
        variants[f"general {_describe(tile)}"] = partial(quack, Tiles(general=tile))
    return variants


def _general_by_torch(load_products: LoadProducts) -> Products:
    return replace(load_products(), apply=torch_products().apply)


def _describe(tile: Tile) -> str:
    """Return `128x256, cluster 2x1`."""
    size = f"{tile.rows}x{tile.columns}, cluster {tile.cluster_rows}x{tile.cluster_columns}"
    return size + (", pingpong" if tile.pingpong else "")


def _call(X_BMN: Tensor, load_products: LoadProducts) -> Call:
    num_matrices, M, N = X_BMN.shape
    choice = choose_kernel(
        "auto", shape=(num_matrices, M, N), dtype=X_BMN.dtype, device=X_BMN.device
    )
    exchanged = replace(choice, load_products=load_products)
    return lambda _: newton_schulz(X_BMN, kernel=exchanged)


def _runs(call: Call, name: str) -> bool:
    """Tell whether tiles compile and launch; QuACK refuses some with errors of many kinds."""
    try:
        call(0)
        torch.cuda.synchronize()
    except (ValueError, RuntimeError, AssertionError, TypeError) as error:
        print(f"{name}: refused, {error}", flush=True)
        return False
    return True
