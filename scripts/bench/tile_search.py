"""Which tile is fastest for QuACK's products at each shape: the source of `Tiles` in src."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from timing import time_interleaved

from trainer.optim.kernels.products import Products, torch_products
from trainer.optim.kernels.symmetric import Tile, Tiles, quack_products

Shape = tuple[int, int, int]

SQUARES = [
    Tile(128, 128),
    Tile(128, 256, cluster_rows=2, pingpong=False),
    Tile(192, 192, pingpong=False),
    Tile(256, 256, pingpong=False),
    Tile(256, 128, cluster_columns=2, pingpong=False),
]
RECTANGLES = [
    Tile(128, 128, cluster_rows=2),
    Tile(128, 160, cluster_rows=2),
    Tile(128, 192, cluster_rows=2),
    Tile(128, 192, cluster_columns=2),
    Tile(128, 208, cluster_rows=2),
    Tile(192, 128, cluster_rows=2),
    Tile(128, 256, cluster_rows=2, pingpong=False),
    Tile(256, 128, cluster_rows=2, pingpong=False),
    Tile(256, 128, cluster_columns=2, pingpong=False),
    Tile(256, 192, cluster_rows=2, pingpong=False),
    Tile(256, 208, cluster_columns=2, pingpong=False),
]


def search_tiles(
    shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device
) -> list[dict[str, Any]]:
    """Time every tile for X·Xᵀ, b·A + c·A·A and a·X + B·X at every shape; print and return rows."""
    capability = torch.cuda.get_device_capability(device)
    rows: list[dict[str, Any]] = []
    for num_matrices, M, N in shapes:
        S, L = sorted((M, N))
        # Tall stacks are iterated on as they lie, on the transposed view.
        X = torch.randn(num_matrices, M, N, device=device).to(dtype) / (S * L) ** 0.5
        wide, A = (
            (X if M <= N else X.mT),
            torch.empty(num_matrices, S, S, device=device, dtype=dtype),
        )
        B, Y = torch.empty_like(A), torch.empty_like(wide)
        quack_products(capability).gram(wide, A)
        products = {"gram": S * S * L, "symmetric": S**3, "apply": 2 * S * S * L}
        for product, flops in products.items():
            tiles = RECTANGLES if product == "apply" else SQUARES
            calls = {"torch": _call(product, torch_products(), wide, A, B, Y)}
            for tile in tiles:
                chosen = quack_products(
                    capability, Tiles(symmetric=tile, symmetric_large=tile, general=tile)
                )
                call = _call(product, chosen, wide, A, B, Y)
                if _runs(call, tile):
                    calls[str(tile)] = call
            timings = time_interleaved(calls, device, warm_up_s=0.05, measure_s=0.3)
            for name, timing in sorted(timings.items(), key=lambda item: item[1].median_ms):
                rate = num_matrices * flops / timing.median_ms * 1e-9
                rows.append(
                    {"shape": [num_matrices, M, N], "product": product, "tile": name}
                    | {"tflops": rate, **asdict(timing)}
                )
                print(f"{num_matrices}x{M}x{N} {product:<10} {rate:6.1f} TFLOP/s  {name}")
    return rows


def _call(
    product: str,
    products: Products,
    X: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    Y: torch.Tensor,
) -> Callable[[int], None]:
    if product == "gram":
        return lambda _: products.gram(X, B)
    if product == "symmetric":
        return lambda _: products.symmetric(A, A, A, 2.0, -3.0, B)
    return lambda _: products.apply(A, X, 3.0, Y)


def _runs(call: Callable[[int], None], tile: Tile) -> bool:
    """Tell whether a tile compiles and launches; QuACK refuses some with errors of many kinds."""
    try:
        call(0)
        torch.cuda.synchronize()
    except (ValueError, RuntimeError, AssertionError, TypeError) as error:
        print(f"{tile}: refused, {error}")
        return False
    return True
