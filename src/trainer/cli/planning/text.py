"""The report's lines: memory a rank, whether it fits, the routing table, the optimizer's price."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

from trainer.cli.planning.activations import Shape
from trainer.cli.planning.memory import GIB, MIB, USABLE, StepMemory, step_memory
from trainer.cli.planning.ranks import RankPlan
from trainer.cli.planning.rollouts import with_rollouts
from trainer.config import RLConfig, RunConfig, SupervisedConfig
from trainer.config.optim import OptimConfig
from trainer.model.architecture import QwenConfig
from trainer.model.attention import choose_attention
from trainer.optim.pricing import Price
from trainer.optim.rates import RATES, predict_ms
from trainer.optim.table import routing_table
from trainer.parallel.devices import GPU


def memory_lines(
    config: RunConfig, hf_config: QwenConfig, ranks: list[RankPlan], gpu: GPU, world_size: int
) -> list[str]:
    """Return the memory table over ranks, and what follows from it for a GPU."""
    shape = micro_batch_shape(config, world_size)

    def count(rank: RankPlan, shape: Shape) -> StepMemory:
        return _memory_of(config, hf_config, rank, shape, world_size)

    memories = [count(rank, shape) for rank in ranks]
    rows: list[tuple[str, Callable[[StepMemory], int]]] = [
        ("weights (fp32)", lambda m: m.weights),
        ("optimizer state", lambda m: m.state),
        ("  gradients by then", lambda m: m.worst.gradients),
        ("  gathered weights", lambda m: m.worst.gathered),
        ("  unsharded gradients", lambda m: m.worst.reduced),
        ("  activations", lambda m: m.worst.activations),
        ("  logits, dispatched rows", lambda m: m.worst.passing),
        ("peak, forward and backward", lambda m: m.model_peak),
        ("  gradients (fp32)", lambda m: m.gradients),
        ("  temporaries", lambda m: m.optimizer),
        ("peak, optimizer step", lambda m: m.optimizer_peak),
    ]
    recompute = "recomputed in the backward" if shape.is_checkpointed else "all kept"
    fullest = max(memories, key=lambda memory: memory.peak)
    name_of_unit, unit = ("GiB", GIB) if fullest.peak >= GIB else ("MiB", MIB)
    lines = [
        f"memory a rank, {name_of_unit}, {shape.num_packs} x {shape.seq_len} tokens, "
        f"activations {recompute} (routing taken as even)",
        f"{'':28}{'min':>12}{'max':>12}{'mean':>12}",
    ]
    for name, of in rows:
        values = [of(memory) / unit for memory in memories]
        lines.append(f"{name:28}{min(values):12.3f}{max(values):12.3f}{fmean(values):12.3f}")
    lines.append(f"the peak of forward and backward is at {fullest.worst.name}")
    rank = ranks[memories.index(fullest)]

    def peak_of_packs(num_packs: int) -> int:
        return count(rank, replace(shape, num_packs=num_packs)).peak

    return [*lines, *_fit_lines(fullest, peak_of_packs, gpu)]


def micro_batch_shape(config: RunConfig, world_size: int) -> Shape:
    """Return what a micro-batch of a run is on a GPU."""
    assert isinstance(config, SupervisedConfig | RLConfig), "every kind of run has packs"
    packs = config.data.micro_batch_size
    num_micro_batches = 2  # RL: how many packs rollouts fill is not known; more than one is safe
    if isinstance(config, SupervisedConfig):
        num_micro_batches = -(-config.data.batch_size // (world_size * packs))
    return Shape(
        packs,
        config.data.seq_len,
        compute_bytes={"float32": 4, "bfloat16": 2}[config.model.compute_dtype],
        attention=choose_attention(config.model.attention, "cuda"),
        logits_chunk_tokens=config.model.logits_chunk_tokens,
        is_checkpointed=config.model.activation_checkpointing,
        keeps_gathered=not config.parallel.reshard_after_forward,
        num_micro_batches=num_micro_batches,
        is_dispatched=config.parallel.ep > 1,
    )


def _memory_of(
    config: RunConfig, hf_config: QwenConfig, rank: RankPlan, shape: Shape, world_size: int
) -> StepMemory:
    memory = step_memory(
        hf_config,
        rank.specs,
        shape,
        num_local=rank.num_local,
        state_bytes=rank.state_bytes,
        optimizer_bytes=rank.price.temporary_bytes if rank.price else 0,
    )
    if isinstance(config, RLConfig):
        return with_rollouts(memory, config, hf_config, rank.specs, shape, world_size)
    return memory


def _fit_lines(memory: StepMemory, peak_of_packs: Callable[[int], int], gpu: GPU) -> list[str]:
    """Say whether a rank fits, and the largest micro-batch that does.

    Args:
        memory: Of the fullest rank.
        peak_of_packs: Its peak with that many packs a forward.
        gpu: What it would have.
    """
    capacity = gpu.memory_gib * USABLE * GIB
    verdict = "fits" if memory.peak <= capacity else "does not fit"
    lines = [
        f"{verdict} {gpu.name.upper()}: {memory.peak / GIB:.3g} of {gpu.memory_gib:.0f} GiB, of "
        f"which {USABLE:.0%} are counted on"
    ]
    largest = largest_fitting(lambda num_packs: peak_of_packs(num_packs) <= capacity)
    lines.append(
        f"largest data.micro_batch_size that fits: {largest}"
        if largest
        else "no micro-batch fits: shard over more ranks (parallel.dp_shard), or recompute "
        "(model.activation_checkpointing), or shorten data.seq_len"
    )
    return lines


def largest_fitting(fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, where all smaller ones do too; 0: none does."""
    stop = 1
    while fits(stop):
        stop *= 2
    return bisect_left(range(stop), True, key=lambda number: not (number == 0 or fits(number))) - 1


def optimizer_lines(optim: OptimConfig, ranks: list[RankPlan], gpu: GPU) -> list[str]:
    """Return the routing table and the price of a step."""
    first = ranks[0]
    if first.plan is None or first.price is None:
        return [_unplanned_line(optim)]
    prices = [rank.price for rank in ranks if rank.price is not None]
    lines = [
        routing_table(first.plan, grouped=True),
        "",
        "optimizer step a rank, the most over ranks",
        f"  Newton-Schulz     {max(p.flops for p in prices) / 1e12:.4g} TFLOP",
        f"  exchanges         {max(p.num_collectives for p in prices)} collectives",
    ]
    axes = sorted({axis for p in prices for axis in p.sent_bytes})
    for axis in axes:
        sent = max(p.sent_bytes.get(axis, 0) for p in prices) / GIB
        lines.append(f"  sent over {axis}: {sent:.3g} GiB")
    return [*lines, *_time_lines(prices, gpu)]


def _unplanned_line(optim: OptimConfig) -> str:
    if optim.type == "dion":
        return "optimizer: dion, whose exchange, time and temporaries are not counted"
    return f"optimizer: {optim.type}, elementwise on each rank's shards, no exchange"


def _time_lines(prices: list[Price], gpu: GPU) -> list[str]:
    name = gpu.name.upper()
    if name not in RATES:
        return [f"  time              not predicted: no rates are measured on {name}"]
    slowest = max((predict_ms(price, name) for price in prices), key=lambda ms: ms["total_ms"])
    parts = ", ".join(f"{key.removesuffix('_ms')} {ms:.1f}" for key, ms in slowest.items())
    return [f"  time on {name}, ms, nothing overlapped: {parts}"]
