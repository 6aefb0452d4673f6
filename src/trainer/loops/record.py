"""From a step's measurements to the metrics that users read, under the names of the design.

Owns names and units of `metrics.jsonl`. Everything here is host arithmetic on values that the step
copied aside; reading them is what waits, one step after they were made.
"""

import resource
from collections.abc import Sequence

import torch

from trainer.losses import perplexity
from trainer.parallel.devices import peak_flops
from trainer.step import StepRecord


def step_metrics(
    record: StepRecord,
    num_skipped: int,
    *,
    flops: float,
    world_size: int,
    device: torch.device,
    is_moe: bool,
) -> dict[str, float | int | None]:
    """Return one step's metrics by name.

    Args:
        record: The step.
        num_skipped: Steps skipped so far, this one's outcome counted.
        flops: The step's model FLOPs over all ranks, forward and backward.
        world_size: Ranks that shared them.
        device: Where peak memory and peak FLOP/s are looked up.
        is_moe: Whether there are experts to report on.
    """
    grad_norm, max_vio, loss, load_balancing, *_ = record.values.read().tolist()
    seconds = record.clock.seconds("start", "optimizer")
    peak = peak_flops(device)
    metrics: dict[str, float | int | None] = {
        "loss/mean": loss,
        "loss/perplexity": perplexity(loss),
        "optim/lr": record.lr,
        "optim/grad_norm": grad_norm,
        "optim/skipped_steps": num_skipped,
        "progress/num_tokens": record.num_tokens,
        "progress/trained_tokens": record.trained_tokens,
        "time/step": seconds,
        "time/forward_backward": record.clock.seconds("forward", "backward"),
        "time/optimizer": record.clock.seconds("backward", "optimizer"),
        "perf/throughput": record.totals.num_tokens / seconds,
        "perf/mfu": None if peak is None else flops / (seconds * peak * world_size),
        "perf/peak_memory": peak_memory_gib(device),
    }
    if is_moe:
        metrics |= {"max_vio/mean": max_vio, "loss/load_balancing": load_balancing}
    return metrics | record.phase_times()


def source_losses(record: StepRecord, names: Sequence[str]) -> dict[str, float]:
    """Return `loss/<name>` of each source that the step trained on.

    Args:
        record: Of a supervised step, with the sources' sums behind its four values.
        names: Of the sources, by index.
    """
    sums = record.values.read()[4 : 4 + len(names)].tolist()
    weights = record.totals.source_weights
    return {
        f"loss/{name}": total / weights[index]
        for index, (name, total) in enumerate(zip(names, sums, strict=True))
        if weights.get(index, 0.0) > 0
    }


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak so far: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
