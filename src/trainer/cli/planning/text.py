"""The report's lines: memory a rank, whether it fits, the routing table, the optimizer's price."""

from collections.abc import Callable
from statistics import fmean

from trainer.cli.planning.memory import (
    GIB,
    USABLE,
    Shape,
    StepMemory,
    largest_micro_batch,
    step_memory,
)
from trainer.cli.planning.ranks import RankPlan
from trainer.config import RLConfig, RunConfig, SupervisedConfig
from trainer.config.optim import OptimConfig
from trainer.model.architecture import QwenConfig
from trainer.optim.pricing import RATES, Price, predict_ms
from trainer.optim.table import routing_table
from trainer.parallel.devices import GPU


def memory_lines(
    config: RunConfig, hf_config: QwenConfig, ranks: list[RankPlan], gpu: GPU
) -> list[str]:
    """Return the memory table over ranks, and what follows from it for a GPU."""
    shape = _micro_batch(config)
    memories = [_memory_of(hf_config, rank, shape) for rank in ranks]
    rows: list[tuple[str, Callable[[StepMemory], int]]] = [
        ("weights (fp32)", lambda m: m.weights),
        ("gradients (fp32)", lambda m: m.gradients),
        ("optimizer state", lambda m: m.state),
        ("gathered weights", lambda m: m.gathered),
        ("unsharded gradients", lambda m: m.reduced),
        ("activations", lambda m: m.activations),
        ("logits of a chunk", lambda m: m.logits),
        ("dispatch to experts", lambda m: m.dispatch),
        ("optimizer temporaries", lambda m: m.optimizer),
        ("peak, forward and backward", lambda m: m.model_peak),
        ("peak, optimizer step", lambda m: m.optimizer_peak),
    ]
    recompute = "recomputed in the backward" if shape.is_checkpointed else "all kept"
    lines = [
        f"memory a rank, GiB, {shape.num_packs} x {shape.seq_len} tokens, activations {recompute}"
        " (routing taken as even)",
        f"{'':28}{'min':>9}{'max':>9}{'mean':>9}",
    ]
    for name, of in rows:
        values = [of(memory) / GIB for memory in memories]
        lines.append(f"{name:28}{min(values):9.3f}{max(values):9.3f}{fmean(values):9.3f}")
    fullest = max(memories, key=lambda memory: memory.model_peak)
    return [*lines, *_fit_lines(hf_config, fullest, shape, gpu)]


def _micro_batch(config: RunConfig) -> Shape:
    assert isinstance(config, SupervisedConfig | RLConfig), "every kind of run has packs"
    return Shape(
        config.data.micro_batch_size,
        config.data.seq_len,
        compute_bytes={"float32": 4, "bfloat16": 2}[config.model.compute_dtype],
        logits_chunk_tokens=config.model.logits_chunk_tokens,
        is_checkpointed=config.model.activation_checkpointing,
        keeps_gathered=not config.parallel.reshard_after_forward,
    )


def _memory_of(hf_config: QwenConfig, rank: RankPlan, shape: Shape) -> StepMemory:
    return step_memory(
        hf_config,
        rank.specs,
        shape,
        num_local=rank.num_local,
        state_bytes=rank.state_bytes,
        optimizer_bytes=rank.price.temporary_bytes if rank.price else 0,
    )


def _fit_lines(hf_config: QwenConfig, memory: StepMemory, shape: Shape, gpu: GPU) -> list[str]:
    capacity = gpu.memory_gib * USABLE * GIB
    peak = max(memory.model_peak, memory.optimizer_peak)
    verdict = "fits" if peak <= capacity else "does not fit"
    lines = [
        f"{verdict} {gpu.name.upper()}: {peak / GIB:.1f} of {gpu.memory_gib:.0f} GiB, of which "
        f"{USABLE:.0%} are counted on"
    ]
    largest = largest_micro_batch(hf_config, memory, shape, capacity)
    lines.append(
        f"largest data.micro_batch_size that fits: {largest}"
        if largest
        else "no micro-batch fits: shard over more ranks (parallel.dp_shard), or recompute "
        "(model.activation_checkpointing), or shorten data.seq_len"
    )
    return lines


def optimizer_lines(optim: OptimConfig, ranks: list[RankPlan], gpu: GPU) -> list[str]:
    """Return the routing table and the price of a step."""
    first = ranks[0]
    if first.plan is None or first.price is None:
        return [f"optimizer: {optim.type}, elementwise on each rank's shards, no exchange"]
    prices = [rank.price for rank in ranks if rank.price is not None]
    lines = [
        routing_table(first.plan, grouped=True),
        "",
        "optimizer step a rank, the most over ranks",
        f"  Newton-Schulz     {max(p.flops for p in prices) / 1e12:.3f} TFLOP",
        f"  exchanges         {max(p.num_collectives for p in prices)} collectives",
    ]
    axes = sorted({axis for p in prices for axis in p.sent_bytes})
    for axis in axes:
        sent = max(p.sent_bytes.get(axis, 0) for p in prices) / GIB
        lines.append(f"  sent over {axis}: {sent:.3f} GiB")
    return [*lines, *_time_lines(prices, gpu)]


def _time_lines(prices: list[Price], gpu: GPU) -> list[str]:
    name = gpu.name.upper()
    if name not in RATES:
        return [f"  time              not predicted: no rates are measured on {name}"]
    slowest = max((predict_ms(price, name) for price in prices), key=lambda ms: ms["total_ms"])
    parts = ", ".join(f"{key.removesuffix('_ms')} {ms:.1f}" for key, ms in slowest.items())
    return [f"  time on {name}, ms, nothing overlapped: {parts}"]
