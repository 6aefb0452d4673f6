"""A picture of a run of RL: rewards and pass rates over steps, from `metrics.jsonl`."""

import json
from pathlib import Path
from typing import Any


def plot_metrics(metrics: Path, out: Path) -> None:
    """Draw mean reward, sampled and held-out pass rate into a PNG.

    Args:
        metrics: `metrics.jsonl` of a run.
        out: Overwritten.
    """
    # Imported here: it takes a second, and only the end of a run needs it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*curve(lines, "reward/mean"), label="reward, mean of samples")
    axes.plot(*curve(lines, "rollout/pass_rate"), label="pass rate, samples", alpha=0.6)
    steps, rates = held_out_curve(lines)
    axes.plot(steps, rates, "o-", label="pass rate, held out, greedy")
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    figure.savefig(out, dpi=120)


def curve(lines: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return steps and values of a metric, where it was recorded."""
    points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def held_out_curve(lines: list[dict[str, Any]]) -> tuple[list[int], list[float]]:
    """Return steps and held-out pass rates, the one before training at step 0."""
    steps, rates = curve(lines, "val/pass_rate")
    _, at_start = curve(lines, "val/pass_rate_at_start")
    return [0] * len(at_start) + steps, at_start + rates
