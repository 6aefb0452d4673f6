#!/usr/bin/env python
"""Newton-Schulz alone: each kernel and dtype at the shapes that matter, beside public baselines.

What bounds it: a call at M x N makes 2·M·M·N (X·Xᵀ), 2·M³ and 2·M·M·N (B·X) operations a step, the
first two halved where one triangle is computed, on matrices that fit the caches badly. At 5 steps
that is hundreds of operations a byte: tensor cores bound it, and the share of the measured ceiling
(a large square product of the same dtype) tells what is left.

For every shape the errors come first, on the six hard inputs (one matrix each) and on Gaussian
stacks, against fp32; then the times. The last line of output is one JSON object.

    python scripts/bench/newton_schulz.py                   # all shapes, bf16 and fp16, on a GPU
    python scripts/bench/newton_schulz.py --shapes headline --baselines quack_seed --save
    python scripts/bench/newton_schulz.py --tiles --shapes headline --save --name tiles
    python scripts/bench/newton_schulz.py --tiny --device cpu
"""

import argparse
import statistics
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from pathlib import Path
from typing import Any

import torch
from baselines import BASELINES, SEED, find_baselines
from records import describe_environment, keep, report
from tile_search import Shape, search_tiles
from timing import Timing, time_interleaved
from torch import Tensor

from trainer.errors import UserError
from trainer.optim.kernels import KernelChoice, choose_kernel
from trainer.optim.kernels.inputs import hard_inputs
from trainer.optim.newton_schulz import newton_schulz, newton_schulz_flops

SHAPES = Path(__file__).with_name("shapes.toml")
NUM_RANKS = 8
MAX_INPUT_BYTES = 2**30
"""Inputs rotated in a timing: at least two, and no more than this takes together."""

SHAPE_KEYS = ["headline", "others", "thresholds", "models"]
LARGEST = "largest_singular_value"


@dataclass(frozen=True)
class Row:
    """One variant at one shape and dtype."""

    shape: Shape
    dtype: str
    variant: str
    is_baseline: bool
    reason: str
    errors: dict[str, float]
    median_ms: float
    spread_ms: float
    tflops: float
    share_of_ceiling: float


def main() -> None:
    """Run the benchmark."""
    arguments = parse_arguments()
    device = torch.device(arguments.device)
    shapes = read_shapes(arguments.shapes, is_tiny=arguments.tiny)
    record: dict[str, Any] = {
        "benchmark": "newton_schulz",
        "environment": describe_environment(device),
        "arguments": vars(arguments),
    }
    if arguments.tiles:
        record["tiles"] = []
        dtype = getattr(torch, arguments.dtypes[0])
        for shape in shapes:
            record["tiles"] += search_tiles(shape, dtype, device, arguments.seconds)
            if arguments.save:
                keep(arguments.name, record)
    else:
        rows: list[Row] = []
        record |= {"ceiling_tflops": {}, "rows": []}
        for dtype in (getattr(torch, name) for name in arguments.dtypes):
            ceiling = measure_ceiling(dtype, device, is_tiny=arguments.tiny)
            record["ceiling_tflops"][name_of(dtype)] = ceiling
            for of_shape in run_dtype(shapes, dtype, device, arguments, ceiling):
                rows += of_shape
                record["rows"] += [asdict(row) for row in of_shape]
                if arguments.save:
                    keep(arguments.name, record)
        record["summary"] = summarize(rows, read_shapes(["headline"], is_tiny=arguments.tiny))
        print_summary(record["summary"])
    report(arguments.name, record, save=arguments.save)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"])
    parser.add_argument(
        "--kernels", nargs="+", default=["auto", "dense", "symmetric", "gram", "syrk"]
    )
    parser.add_argument(
        "--shapes", nargs="+", default=SHAPE_KEYS, choices=SHAPE_KEYS, help="of shapes.toml"
    )
    parser.add_argument(
        "--baselines", nargs="*", default=BASELINES, choices=BASELINES, help="to compare with"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="of measuring, for each shape")
    parser.add_argument("--tiles", action="store_true", help="search tiles instead")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to test this script")
    parser.add_argument("--save", action="store_true", help="keep the record under results/")
    parser.add_argument("--name", default="newton_schulz", help="of the kept record")
    return parser.parse_args()


def read_shapes(keys: Sequence[str], *, is_tiny: bool) -> list[Shape]:
    """Return the stacks of these keys of the table, `models` being each model's rank, once each."""
    content = tomllib.loads(SHAPES.read_text())
    table = content["tiny" if is_tiny else "table"]
    shapes: list[Shape] = [tuple(shape) for key in keys if key != "models" for shape in table[key]]
    if "models" in keys and not is_tiny:
        for model in content["models"].values():
            shapes += rank_shapes(model)
    return list(dict.fromkeys(shapes))


def rank_shapes(model: dict[str, int]) -> list[Shape]:
    """Return the stacks of one of `NUM_RANKS` ranks: dense ones shared out, experts local."""
    D, per_rank = model["hidden"], -(-model["layers"] // NUM_RANKS)
    query, key_value = (model[name] * model["head_dim"] for name in ("heads", "kv_heads"))
    shapes = [(per_rank, query, D), (2 * per_rank, key_value, D), (per_rank, D, query)]
    if "experts" in model:
        E, F = model["experts"], model["expert_hidden"]
        local = E // NUM_RANKS
        return [*shapes, (per_rank, E, D), (local, 2 * F, D), (local, D, F)]
    F = model["hidden_mlp"]
    return [*shapes, (2 * per_rank, F, D), (per_rank, D, F)]


def measure_ceiling(dtype: torch.dtype, device: torch.device, *, is_tiny: bool) -> float:
    """Return the TFLOP/s of one large square product, the practical peak of the device."""
    size = 64 if is_tiny else 8192
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    timing = time_interleaved({"product": lambda _: a @ b}, device, measure_s=0.5)["product"]
    tflops = 2 * size**3 / timing.median_ms * 1e-9
    print(f"ceiling, {name_of(dtype)} {size}x{size} product: {tflops:.4g} TFLOP/s")
    return tflops


def run_dtype(
    shapes: Sequence[Shape],
    dtype: torch.dtype,
    device: torch.device,
    arguments: argparse.Namespace,
    ceiling_tflops: float,
) -> Iterator[list[Row]]:
    """Print one block, every shape in one dtype, and yield the rows of each."""
    for shape in shapes:
        print(f"\n{name_of(dtype)} {'x'.join(map(str, shape))}")
        variants, choices = find_variants(arguments, shape, dtype, device)
        errors = measure_errors(variants, shape, dtype, device)
        print_errors(errors)
        timings = time_variants(variants, shape, dtype, device, arguments.seconds)
        rows = [
            make_row(shape, dtype, name, choices.get(name), errors[name], timing, ceiling_tflops)
            for name, timing in timings.items()
        ]
        for row in rows:
            print_row(row)
        yield rows


def find_variants(
    arguments: argparse.Namespace, shape: Shape, dtype: torch.dtype, device: torch.device
) -> tuple[dict[str, Callable[[Tensor], Tensor]], dict[str, KernelChoice]]:
    """Return what runs at this shape, ours and baselines, and the choices behind ours."""
    variants: dict[str, Callable[[Tensor], Tensor]] = {}
    choices = {}
    for kernel in arguments.kernels:
        try:
            choice = choose_kernel(kernel, shape=shape, dtype=dtype, device=device)
        except UserError as refusal:
            print(f"  {kernel}: {refusal}")
            continue
        choices[kernel] = choice
        variants[kernel] = lambda X, choice=choice: newton_schulz(X, dtype=dtype, kernel=choice)
    return variants | find_baselines(arguments.baselines, dtype, device), choices


def measure_errors(
    variants: dict[str, Callable[[Tensor], Tensor]],
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, dict[str, float]]:
    """Return by variant: relative Frobenius errors by input, and the largest singular value.

    The reference is the fp32 iteration of the input as rounded to `dtype`, so that the errors are
    those of the iteration alone.
    """
    _, M, N = shape
    errors: dict[str, dict[str, float]] = {name: {} for name in variants}
    largest = dict.fromkeys(variants, 0.0)
    for input_name, wide_MN in hard_inputs(min(M, N), max(M, N), device=device).items():
        X_BMN = (wide_MN if M <= N else wide_MN.mT)[None].to(dtype)
        reference = newton_schulz(X_BMN, dtype=torch.float32, kernel="dense")
        for name, function in variants.items():
            result = function(X_BMN).float()
            errors[name][input_name] = float((result - reference).norm() / reference.norm())
            largest[name] = max(largest[name], largest_singular_value(result[0]))
    return {name: {**errors[name], LARGEST: largest[name]} for name in variants}


def largest_singular_value(X_MN: Tensor, num_iterations: int = 30) -> float:
    """Return it within about a percent, by iterating on a subspace: an SVD takes minutes here."""
    generator = torch.Generator(X_MN.device).manual_seed(0)
    size = (X_MN.shape[1], min(16, *X_MN.shape))
    subspace = torch.randn(size, generator=generator, device=X_MN.device)
    for _ in range(num_iterations):
        subspace = torch.linalg.qr(X_MN.mT @ (X_MN @ subspace)).Q
    return float(torch.linalg.matrix_norm(X_MN @ subspace, 2))


def time_variants(
    variants: dict[str, Callable[[Tensor], Tensor]],
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    seconds: float,
) -> dict[str, Timing]:
    """Time all variants at one shape, interleaved, over inputs that no cache holds together."""
    num_matrices, M, N = shape
    num_bytes = num_matrices * M * N * dtype.itemsize
    num_inputs = max(2, min(8, MAX_INPUT_BYTES // num_bytes))
    inputs = [torch.randn(shape, device=device).to(dtype) for _ in range(num_inputs)]

    def rotated(function: Callable[[Tensor], Tensor]) -> Callable[[int], Tensor]:
        return lambda index: function(inputs[index % num_inputs])

    calls = {name: rotated(function) for name, function in variants.items()}
    return time_interleaved(calls, device, warm_up_s=seconds / 5, measure_s=seconds)


def make_row(
    shape: Shape,
    dtype: torch.dtype,
    variant: str,
    choice: KernelChoice | None,
    errors: dict[str, float],
    timing: Timing,
    ceiling_tflops: float,
) -> Row:
    """Return the row; a baseline counts the FLOPs of the full products, whatever it skips."""
    counted = choice or KernelChoice("dense", "baseline")
    flops = newton_schulz_flops(shape, dtype=dtype, kernel=counted)
    tflops = flops / timing.median_ms * 1e-9
    return Row(
        shape=shape,
        dtype=name_of(dtype),
        variant=variant,
        is_baseline=choice is None,
        reason=f"{choice.name}: {choice.reason}" if choice else "",
        errors=errors,
        median_ms=timing.median_ms,
        spread_ms=timing.spread_ms,
        tflops=tflops,
        share_of_ceiling=tflops / ceiling_tflops,
    )


def summarize(rows: Sequence[Row], headline: Sequence[Shape]) -> dict[str, Any]:
    """Return, by dtype: auto against the best baseline at each shape, and against QuACK's call."""
    summary = {}
    for dtype in dict.fromkeys(row.dtype for row in rows):
        of_dtype = [row for row in rows if row.dtype == dtype]
        by_key = {(row.shape, row.variant): row for row in of_dtype}
        speedups, seed_speedups = {}, []
        for shape in dict.fromkeys(row.shape for row in of_dtype):
            auto = by_key.get((shape, "auto"))
            baselines = [r.median_ms for r in of_dtype if r.shape == shape and r.is_baseline]
            if auto is None or not baselines:
                continue
            speedups["x".join(map(str, shape))] = min(baselines) / auto.median_ms
            seed = by_key.get((shape, SEED))
            if seed is not None and shape in headline:
                seed_speedups.append(seed.median_ms / auto.median_ms)
        summary[dtype] = {
            "auto_over_best_baseline": speedups,
            "auto_over_quack_seed_geometric_mean": geometric_mean(seed_speedups),
            "least_exact_input_over_dense": worst_error_ratio(by_key),
        }
    return summary


def worst_error_ratio(by_key: dict[tuple[Shape, str], Row]) -> float | None:
    """Return the largest error of auto over that of dense, over all inputs and shapes."""
    ratios = [
        row.errors[name] / by_key[shape, "dense"].errors[name]
        for (shape, variant), row in by_key.items()
        if variant == "auto" and (shape, "dense") in by_key
        for name in row.errors.keys() - {LARGEST}
        if by_key[shape, "dense"].errors[name] > 0
    ]
    return max(ratios, default=None)


def geometric_mean(values: Sequence[float]) -> float | None:
    """Return the geometric mean, or None of nothing."""
    return exp(statistics.fmean(log(value) for value in values)) if values else None


def print_errors(errors: dict[str, dict[str, float]]) -> None:
    """Print the errors of every variant, input by input."""
    for name, by_input in errors.items():
        listed = "  ".join(f"{key} {value:.2e}" for key, value in by_input.items())
        print(f"  {name:<20} {listed}")


def print_row(row: Row) -> None:
    """Print the time of one variant."""
    print(
        f"  {row.variant:<20} {row.median_ms:9.3f} ms ± {row.spread_ms:.3f}"
        f"  {row.tflops:7.1f} TFLOP/s  {row.share_of_ceiling:6.1%}  {row.reason}"
    )


def print_summary(summary: dict[str, Any]) -> None:
    """Print each dtype's comparison with the baselines."""
    for dtype, facts in summary.items():
        print(f"\n{dtype}: {facts}")


def name_of(dtype: torch.dtype) -> str:
    """Return `bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()
