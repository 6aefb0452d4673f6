"""Reads a run's metrics."""

import json
from pathlib import Path
from typing import Any

TIMES = (
    "time/",
    "perf/",
    "optim/momentum_ms",
    "optim/newton_schulz_ms",
    "optim/exchange",
    "optim/update_ms",
    "rollout/tokens_per_second",
)
"""How metrics begin that no two runs have alike."""


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of each step of the run in `folder`."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def repeatable_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics that an equal run has too, of each step."""
    return [
        {name: value for name, value in line.items() if not name.startswith(TIMES)}
        for line in metrics_of(folder)
    ]
