#!/usr/bin/env python
"""A full SFT step: our model and step, and transformers' own in a plain FSDP2 loop.

The model is some layers of the 30B shape, as many as fit with their optimizer; random weights and
tokens, bf16 compute, fp32 weights, the same Muon. Each variant is built, timed and dropped.
Reported: tokens a second, MFU (6 FLOPs a token and active weight, causal attention counted), the
optimizer's share, host synchronizations, where the device's time goes, and peak memory over the
sequence's length, which should be a straight line. Under torchrun the step's packs are dealt to the
ranks; transformers' model is sharded by FSDP2 alone, ours by `--ep` too.

    python scripts/bench/train_step.py --save
    python scripts/bench/train_step.py --variants ours transformers --tokens 65536
    python scripts/bench/train_step.py --variants --memory-lengths 8192 16384 32768 65536
    torchrun --nproc-per-node 2 scripts/bench/train_step.py --ep 2 --variants ours transformers
    python scripts/bench/train_step.py --tiny --device cpu

The last line of output is one JSON object.
"""

import argparse
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from device import peak, release, reset_peak, synchronize
from rank_model import largest_over_ranks, read_model
from records import describe_environment, keep, print_now, report
from torch.profiler import ProfilerActivity, profile
from trainees import Trainee, Workload, make_packs, ours, transformers_own

from trainer.clock import Clock
from trainer.config.model import ModelConfig
from trainer.config.parallel import ParallelConfig
from trainer.data.packing import Pack
from trainer.model.architecture import resolve_architecture
from trainer.model.flops import training_flops
from trainer.parallel.devices import peak_flops
from trainer.parallel.world import World, open_world

Build = Callable[[ModelConfig, Workload], Trainee]

VARIANTS: dict[str, tuple[Build, dict[str, Any]]] = {
    "ours": (ours, {}),
    "transformers": (transformers_own, {}),
    "ours_compiled": (ours, {"compile": True}),
    "transformers_compiled": (transformers_own, {"compile": True}),
    "ours_checkpointed": (ours, {"activation_checkpointing": True}),
    "ours_sdpa": (ours, {"attention": "sdpa"}),
}
DEFAULTS = ["ours", "transformers", "ours_compiled", "transformers_compiled"]
NUM_KERNELS = 20
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One variant.

    Attributes:
        variant: A name of `VARIANTS`.
        median_s: Seconds a step, on the slowest rank.
        spread_s: Slowest less fastest.
        tokens_per_s: Throughput of all ranks.
        mfu: Share of the devices' peak; None where that is unknown.
        optimizer_s: Of the step, clipping included.
        optimizer_share: The same as a share.
        peak_gib: Allocated at most, on any rank.
        num_syncs: Times a step the host waits for the device; None: not a GPU.
        kernels_ms: Device time of one step by kernel, the longest first.
    """

    variant: str
    median_s: float
    spread_s: float
    tokens_per_s: float
    mfu: float | None
    optimizer_s: float
    optimizer_share: float
    peak_gib: float
    num_syncs: int | None
    kernels_ms: dict[str, float]


def main() -> None:
    """Run the benchmark."""
    arguments = parse_arguments()
    config = read_model(arguments.model, arguments.layers, is_tiny=arguments.tiny)
    with open_world(ParallelConfig(device=arguments.device)) as world:
        run_benchmark(config, arguments, world)


def run_benchmark(config: ModelConfig, arguments: argparse.Namespace, world: World) -> None:
    """Measure every variant; rank 0 prints and keeps the record.

    Collective: all ranks.
    """
    say = print_now if world.is_first else lambda _: None
    rows: list[Row] = []
    record: dict[str, Any] = {
        "benchmark": "train_step",
        "environment": describe_environment(world.device),
        "arguments": vars(arguments),
        "num_ranks": world.size,
        "rows": [],
    }
    for name in arguments.variants:
        rows.append(run_variant(name, config, arguments, world))
        say(format_row(rows[-1]))
        record["rows"].append(asdict(rows[-1]))
        if arguments.save and world.is_first:
            keep(arguments.name, record)
    record["peak_gib_by_tokens"] = {}
    for length in arguments.memory_lengths:
        peak_gib = measure_memory(length, config, arguments, world)
        say(f"{length} tokens in one pack: peak {peak_gib:.2f} GiB")
        record["peak_gib_by_tokens"][str(length)] = peak_gib
    record["summary"] = summarize(rows)
    if world.is_first:
        report(arguments.name, record, save=arguments.save)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if has_gpu else "cpu")
    parser.add_argument("--model", default="qwen3_30b_a3b", help="a file of configs/models")
    parser.add_argument("--layers", type=int, default=8, help="of the model's")
    parser.add_argument("--ep", type=int, default=1, help="parallel.ep of our variants")
    parser.add_argument("--tokens", type=int, default=65536, help="of a step, over all ranks")
    parser.add_argument("--seq-len", type=int, default=8192, help="tokens of a pack")
    parser.add_argument("--micro-batch-size", type=int, default=1, help="packs a forward")
    parser.add_argument("--variants", nargs="*", default=DEFAULTS, choices=list(VARIANTS))
    parser.add_argument("--warm-up", type=int, default=3, help="steps before those measured")
    parser.add_argument("--steps", type=int, default=5, help="steps measured")
    parser.add_argument(
        "--memory-lengths", type=int, nargs="*", default=[], help="lengths of one pack a step"
    )
    parser.add_argument("--memory-variant", default="ours_checkpointed", choices=list(VARIANTS))
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to test this script")
    parser.add_argument("--save", action="store_true", help="keep the record under results/")
    parser.add_argument("--name", default="train_step", help="of the kept record")
    return parser.parse_args()


def run_variant(name: str, config: ModelConfig, arguments: argparse.Namespace, world: World) -> Row:
    """Build, warm up, time and profile one variant.

    Collective: all ranks.
    """
    device = world.device
    architecture = resolve_architecture(config)
    num_packs = max(1, arguments.tokens // (arguments.seq_len * world.size)) * world.size
    packs = make_packs(num_packs, arguments.seq_len, architecture.vocab_size)
    trainee = build(name, config, packs, arguments, world)
    for _ in range(arguments.warm_up):
        time_step(trainee, device)
    reset_peak(device)
    times = [time_step(trainee, device) for _ in range(arguments.steps)]
    step_s = statistics.median(total for total, _ in times)
    optimizer_s = statistics.median(of_optimizer for _, of_optimizer in times)
    num_tokens = num_packs * arguments.seq_len
    pairs = num_packs * arguments.seq_len * (arguments.seq_len + 1) // 2
    device_flops = peak_flops(device)
    flops_per_s = training_flops(architecture, num_tokens, pairs) / (step_s * world.size)
    row = Row(
        variant=name,
        median_s=step_s,
        spread_s=max(times)[0] - min(times)[0],
        tokens_per_s=num_tokens / step_s,
        mfu=None if device_flops is None else flops_per_s / device_flops,
        optimizer_s=optimizer_s,
        optimizer_share=optimizer_s / step_s,
        peak_gib=largest_over_ranks(peak(device) / GIB, device),
        num_syncs=count_syncs(trainee, device),
        kernels_ms=profile_kernels(trainee, device),
    )
    del trainee
    release(device)
    return row


def build(
    name: str,
    config: ModelConfig,
    packs: Sequence[Pack],
    arguments: argparse.Namespace,
    world: World,
) -> Trainee:
    """Return a variant, ready to train on this rank's share of the packs.

    Collective: all ranks.
    """
    make, settings = VARIANTS[name]
    workload = Workload(
        packs=packs,
        local_packs=packs[world.rank :: world.size],
        micro_batch_size=arguments.micro_batch_size,
        ep=arguments.ep,
        device=world.device,
    )
    return make(config.model_copy(update=settings), workload)


def time_step(trainee: Trainee, device: torch.device) -> tuple[float, float]:
    """Return the seconds of a step and, of those, of clipping and the optimizer.

    Those of the slowest rank. Collective: all ranks.
    """
    clock = Clock(device)
    synchronize(device)
    trainee.step(clock)
    step_s, optimizer_s = (clock.seconds(since, "optimizer") for since in ("start", "backward"))
    return largest_over_ranks(step_s, device), largest_over_ranks(optimizer_s, device)


def count_syncs(trainee: Trainee, device: torch.device) -> int | None:
    """Return how often a step makes the host wait for the device, as torch reports it."""
    if device.type != "cuda":
        return None
    synchronize(device)
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainee.step(Clock(device))
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def profile_kernels(trainee: Trainee, device: torch.device) -> dict[str, float]:
    """Return the milliseconds of one step's longest kernels, and of all of them together."""
    if device.type != "cuda":
        return {}
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        trainee.step(Clock(device))
        synchronize(device)
    times = {e.key[:120]: e.self_device_time_total / 1e3 for e in profiler.key_averages()}
    longest = sorted(times.items(), key=lambda item: -item[1])[:NUM_KERNELS]
    return {"all": sum(times.values()), **dict(longest)}


def measure_memory(
    length: int, config: ModelConfig, arguments: argparse.Namespace, world: World
) -> float:
    """Return the peak GiB of a step on one pack a rank, of a length.

    Collective: all ranks.
    """
    device = world.device
    packs = make_packs(world.size, length, resolve_architecture(config).vocab_size)
    trainee = build(arguments.memory_variant, config, packs, arguments, world)
    time_step(trainee, device)
    reset_peak(device)
    time_step(trainee, device)
    peak_gib = largest_over_ranks(peak(device) / GIB, device)
    del trainee
    release(device)
    return peak_gib


def summarize(rows: Sequence[Row]) -> dict[str, float]:
    """Return our throughput over that of transformers' model, with and without compile."""
    speed = {row.variant: row.tokens_per_s for row in rows}
    pairs = {
        "eager": ("ours", "transformers"),
        "compiled": ("ours_compiled", "transformers_compiled"),
    }
    return {
        name: speed[first] / speed[second]
        for name, (first, second) in pairs.items()
        if first in speed and second in speed
    }


def format_row(row: Row) -> str:
    """Return the line of the table."""
    mfu = "" if row.mfu is None else f"  MFU {row.mfu:.1%}"
    syncs = "" if row.num_syncs is None else f"  {row.num_syncs} host syncs"
    return (
        f"{row.variant:<22} {row.median_s:.3f} s ± {row.spread_s:.3f}"
        f"  {row.tokens_per_s:,.0f} tokens/s{mfu}  optimizer {row.optimizer_s * 1e3:.0f} ms"
        f" ({row.optimizer_share:.1%})  peak {row.peak_gib:.1f} GiB{syncs}"
    )


if __name__ == "__main__":
    main()
