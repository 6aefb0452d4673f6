#!/usr/bin/env python
"""One rank's optimizer step of a whole model: ours, dion's, AdamW, on the same matrices.

Eight ranks of Qwen3-30B-A3B are imagined on one GPU: `setup_model` and `setup_optimizer` shard the
48 layers as they would on eight, torch's fake process group moves nothing, and buffers that would
be received are filled from what is sent. So the times are those of one rank's computing. Under
torchrun the ranks are real, and so are the exchanges.

What bounds it: Newton-Schulz of 768 stacks of 1536x2048 and of 2048x768, about 80 TFLOP, and 28
bytes a weight (gradient read, momentum read, written and read again, update written and read,
weight read and written), 106 GB.

    python scripts/bench/muon_step.py                                  # one GPU, ep 8, 1 and 2
    python scripts/bench/muon_step.py --ep 8 --variants ours dion_quack --save
    torchrun --nproc-per-node 2 scripts/bench/muon_step.py --ep 2 1 --layers 12
    python scripts/bench/muon_step.py --tiny --device cpu

Baselines need dion (microsoft/dion at 0a059a4) on PYTHONPATH. The last line of output is one JSON
object.
"""

import argparse
import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from device import allocated, peak, release, reset_peak, synchronize
from idle import measure_idle
from rank_model import (
    build_model,
    fill_gradients_,
    held_gib,
    is_launched,
    largest_over_ranks,
    open_ranks,
    read_model,
)
from records import describe_environment, keep, print_now, report
from step_variants import BASELINE, DEFAULTS, HEADLINE, VARIANTS
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trainer.errors import UserError
from trainer.optim import Muon
from trainer.optim.rates import RATES, predict_ms

GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One variant at one `ep`, the slowest rank's times.

    Attributes:
        variant: A name of step_variants.py.
        ep: `parallel.ep`.
        median_s: Seconds a step.
        spread_s: Slowest less fastest.
        held_gib: Weights, gradients and state of this rank.
        extra_gib: Peak above that during a step.
        idle_share: Share of a step in which no kernel runs; None: not a GPU.
        phases_ms: Our optimizer's phases.
        predicted_s: By `trainer plan`'s rates; None: unknown device, or not ours.
        predicted_extra_gib: By the same.
    """

    variant: str
    ep: int
    median_s: float
    spread_s: float
    held_gib: float
    extra_gib: float
    idle_share: float | None
    phases_ms: dict[str, float]
    predicted_s: float | None
    predicted_extra_gib: float | None


def main() -> None:
    """Run the benchmark."""
    arguments = parse_arguments()
    logging.basicConfig(level=logging.WARNING)
    config = read_model(arguments.model, arguments.layers, is_tiny=arguments.tiny)
    rows: list[Row] = []
    with open_ranks(arguments.device, arguments.ranks, arguments.rank) as num_ranks:
        is_first = not is_launched() or dist.get_rank() == 0
        device = torch.device(arguments.device)
        say = print_now if is_first else lambda _: None
        record: dict[str, Any] = {
            "benchmark": "muon_step",
            "environment": describe_environment(device),
            "arguments": vars(arguments),
            "num_ranks": num_ranks,
            "ranks_are_real": is_launched(),
            "rows": [],
        }
        for ep in arguments.ep:
            model, mesh = build_model(config, ep, arguments.device)
            fill_gradients_(model, seed=1)
            for name in arguments.variants:
                row = run_variant(name, ep, model, mesh, device, arguments)
                if isinstance(row, str):
                    say(f"ep {ep} {name}: skipped, {row}")
                    continue
                rows.append(row)
                say(format_row(row))
                record["rows"].append(asdict(row))
                if arguments.save and is_first:
                    keep(arguments.name, record)
            del model, mesh
            release(device)
        record["summary"] = summarize(rows)
        if is_first:
            report(arguments.name, record, save=arguments.save)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="qwen3_30b_a3b", help="a file of configs/models")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--ranks", type=int, default=8, help="imagined ranks")
    parser.add_argument("--rank", type=int, default=3, help="which of them this is")
    parser.add_argument("--ep", type=int, nargs="+", default=[8, 1, 2])
    parser.add_argument("--variants", nargs="+", default=DEFAULTS, choices=list(VARIANTS))
    parser.add_argument("--warm-up", type=int, default=3, help="steps before those measured")
    parser.add_argument("--steps", type=int, default=5, help="steps measured")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to test this script")
    parser.add_argument("--save", action="store_true", help="keep the record under results/")
    parser.add_argument("--name", default="muon_step", help="of the kept record")
    return parser.parse_args()


def run_variant(
    name: str,
    ep: int,
    model: nn.Module,
    mesh: DeviceMesh,
    device: torch.device,
    arguments: argparse.Namespace,
) -> Row | str:
    """Return the row of one variant, or why it cannot run here."""
    try:
        optimizer = VARIANTS[name](model, mesh)
    except UserError as refusal:
        return str(refusal)
    step = Step(optimizer, device)
    for _ in range(arguments.warm_up):
        step()
    reset_peak(device)
    before = allocated(device)
    times = [step() for _ in range(arguments.steps)]
    extra = (peak(device) - before) / GIB
    phases = optimizer.phase_times()() if isinstance(optimizer, Muon) else {}
    predicted_s, predicted_gib = predict(optimizer, device)
    row = Row(
        variant=name,
        ep=ep,
        median_s=statistics.median(times),
        spread_s=max(times) - min(times),
        held_gib=held_gib(model, optimizer),
        extra_gib=extra,
        idle_share=measure_idle(step, device),
        phases_ms=phases,
        predicted_s=predicted_s,
        predicted_extra_gib=predicted_gib,
    )
    del optimizer, step
    release(device)
    return row


class Step:
    """Times one optimizer step as S1's table does: synchronize, step, synchronize."""

    def __init__(self, optimizer: Any, device: torch.device) -> None:
        self._optimizer = optimizer
        self._device = device
        # As in training: every update waits for a flag on the device.
        self._finite = torch.tensor(True, device=device)

    def __call__(self) -> float:
        """Return the seconds of a step on the slowest rank."""
        synchronize(self._device)
        start = time.perf_counter()
        self.launch()
        synchronize(self._device)
        return largest_over_ranks(time.perf_counter() - start, self._device)

    def launch(self) -> None:
        """Take a step without waiting for it."""
        self._optimizer.step(finite=self._finite)


def predict(
    optimizer: torch.optim.Optimizer, device: torch.device
) -> tuple[float | None, float | None]:
    """Return the seconds and the GiB above what is held that `trainer plan` predicts."""
    if not isinstance(optimizer, Muon):
        return None, None
    price = optimizer.price()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    gpu = next((known for known in RATES if known in name), None)
    seconds = None
    if gpu is not None:
        predicted = predict_ms(price, gpu)
        exchange = 0.0 if is_launched() else predicted["exchange_ms"]
        seconds = (predicted["total_ms"] - exchange) / 1e3
    return seconds, price.temporary_bytes / GIB


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Return, by `ep`, the speed of ours over each baseline; and how far the `ep`s differ."""
    ours = {row.ep: row for row in rows if row.variant == HEADLINE}
    speedups = {
        f"ep {row.ep}: {row.variant} / {HEADLINE}": row.median_s / ours[row.ep].median_s
        for row in rows
        if row.ep in ours and row.variant != HEADLINE
    }
    times = [row.median_s for row in ours.values()]
    return {
        "headline": f"{BASELINE} / {HEADLINE}",
        "speedups": speedups,
        "slowest_over_fastest_ep": max(times) / min(times) if times else None,
    }


def format_row(row: Row) -> str:
    """Return the line of the table."""
    idle = "" if row.idle_share is None else f"  idle {row.idle_share:5.1%}"
    phases = "  ".join(f"{key.removeprefix('optim/')} {v:.1f}" for key, v in row.phases_ms.items())
    predicted = "" if row.predicted_s is None else f"  predicted {row.predicted_s:.4f} s"
    if row.predicted_extra_gib is not None:
        predicted += f" {row.predicted_extra_gib:.2f} GiB"
    return (
        f"ep {row.ep} {row.variant:<18} {row.median_s:.4f} s ± {row.spread_s:.4f}"
        f"  {row.held_gib:.1f} GiB held + {row.extra_gib:.2f}{idle}{predicted}  {phases}"
    )


if __name__ == "__main__":
    main()
