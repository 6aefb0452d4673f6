"""Figures and tables of the optimizer study, from its JSON."""

import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLORS = {
    "adamw": "tab:orange",
    "muon": "tab:blue",
    "adamw, rest tuned too": "tab:red",
    "muon, rest tuned too": "tab:green",
}


def draw_comparison(record: dict[str, Any], out: Path) -> None:
    """Draw validation loss against tokens and against time, a line a seed."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    for index, axis in enumerate(("tokens", "seconds")):
        axes = figure.add_subplot(1, 2, index + 1)
        for name, runs in record["compared"].items():
            for seed, curve in enumerate(runs):
                label = f"{name}, lr {_rates(record, name)}" if seed == 0 else None
                axes.plot(
                    _places(record, name, curve, axis),
                    curve["val_loss"],
                    "o-",
                    ms=3,
                    color=COLORS[name],
                    label=label,
                )
        axes.set_xlabel(
            "tokens" if axis == "tokens" else "seconds in undisturbed steps, one CPU thread"
        )
        axes.set_ylabel("validation loss (nats a byte)")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(out, dpi=120)


def draw_overlay(record: dict[str, Any], out: Path) -> None:
    """Draw training losses that must coincide and their distance from the first; a row a group."""
    groups = record["overlaid"]
    figure = Figure(figsize=(10, 4 * len(groups)), layout="constrained")
    FigureCanvasAgg(figure)
    for row, (group, curves) in enumerate(groups.items()):
        losses_axes, apart_axes = (
            figure.add_subplot(len(groups), 2, 2 * row + column) for column in (1, 2)
        )
        reference = next(iter(curves.values()))
        for name, losses in curves.items():
            steps = range(1, len(losses) + 1)
            losses_axes.plot(steps, losses, label=name)
            apart_axes.semilogy(
                steps, [max(1e-9, d) for d in _apart(losses, reference)], label=name
            )
        losses_axes.set_ylabel(f"training loss, {group}")
        apart_axes.set_ylabel("distance from the first (1e-9: none)")
        for axes in (losses_axes, apart_axes):
            axes.set_xlabel("step")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=7)
    figure.savefig(out, dpi=120)


def table(record: dict[str, Any]) -> str:
    """Return the study's tables as Markdown."""
    return "\n".join([*_comparison(record), "", *_tuning(record), "", *_overlay(record), ""])


def _comparison(record: dict[str, Any]) -> list[str]:
    lines = [
        "| optimizer | lr of matrices, of the rest | validation loss | bits a byte | s a step | "
        "of it optimizer | tokens to AdamW's final loss | time to it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    goal = statistics.mean(curve["val_loss"][-1] for curve in record["compared"]["adamw"])
    for name, runs in record["compared"].items():
        cells = [
            name,
            _rates(record, name),
            _spread([curve["val_loss"][-1] for curve in runs]),
            _spread([curve["val_bits_per_byte"][-1] for curve in runs]),
            f"{record['step_seconds'][name]:.3f}",
            f"{record['optimizer_seconds'][name]:.3f}",
            _reached(record, name, "tokens", goal),
            _reached(record, name, "seconds", goal),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _tuning(record: dict[str, Any]) -> list[str]:
    lines = ["| optimizer | learning rate: validation loss at seed 0 |", "|---|---|"]
    for name, losses in record["tuning"].items():
        tried = ", ".join(
            f"{lr}: diverged" if loss is None else f"{lr}: {loss:.4f}"
            for lr, loss in losses.items()
        )
        lines.append(f"| {name} | {tried} |")
    return lines


def _overlay(record: dict[str, Any]) -> list[str]:
    lines = [
        "| same run, computed as | greatest distance of its loss, steps 1 to 10 | of all steps |",
        "|---|---|---|",
    ]
    for group, curves in record["overlaid"].items():
        reference = next(iter(curves.values()))
        for name, losses in curves.items():
            apart = _apart(losses, reference)
            cells = [f"{group}: {name}", f"{max(apart[:10]):.1e}", f"{max(apart):.1e}"]
            lines.append("| " + " | ".join(cells) + f" of {len(losses)} |")
    return lines


def _apart(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(losses, reference, strict=True)]


def _spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.4f}"
    return f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}"


def _rates(record: dict[str, Any], name: str) -> str:
    lr, rest = record["best_lr"][name]
    return f"{lr}, {rest}"


def _places(record: dict[str, Any], name: str, curve: dict[str, Any], axis: str) -> list[float]:
    """Return where on an axis a run was evaluated; seconds are of undisturbed steps."""
    if axis == "tokens":
        return curve["val_tokens"]
    return [step * record["step_seconds"][name] for step in curve["val_steps"]]


def _reached(record: dict[str, Any], name: str, axis: str, goal: float) -> str:
    """Return the median of where validation loss meets the goal, linear between evaluations."""
    runs = record["compared"][name]
    crossings = (_crossing(_places(record, name, c, axis), c["val_loss"], goal) for c in runs)
    places = [place for place in crossings if place is not None]
    if len(places) < len(runs):
        return f"{len(places)} of {len(runs)} runs do"
    unit = "" if axis == "tokens" else " s"
    return f"{statistics.median(places):,.0f}{unit}"


def _crossing(places: Sequence[float], losses: Sequence[float], goal: float) -> float | None:
    points = list(zip(places, losses, strict=True))
    for (x0, y0), (x1, y1) in pairwise(points):
        if y1 <= goal:
            return x0 + (x1 - x0) * min(1.0, max(0.0, (y0 - goal) / (y0 - y1)))
    return None
