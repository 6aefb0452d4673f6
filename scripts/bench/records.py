"""Where a benchmark's numbers came from, and the file that keeps them.

A host that got a copy without its history is told the commit in the variable BENCH_COMMIT.
"""

import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Return device, driver, torch, packages, commit and whether the tree differs from it."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "commit": _output("git", "rev-parse", "HEAD") or os.environ.get("BENCH_COMMIT", ""),
        "is_dirty": bool(_output("git", "status", "--porcelain", "--untracked-files=no")),
    }


def report(name: str, record: Mapping[str, Any], *, save: bool) -> None:
    """Print the record as the last line of output; `save` keeps it as results/<gpu>/<name>.json.

    Raises:
        RuntimeError: `save` outside a commit: a number without its commit is not kept.
    """
    if save:
        keep(name, record)
    print(json.dumps(record))


def keep(name: str, record: Mapping[str, Any]) -> None:
    """Write the record to results/<gpu>/<name>.json, also while more rows are to come.

    Raises:
        RuntimeError: outside a commit.
    """
    if not record["environment"]["commit"]:
        raise RuntimeError("no commit to name, so nothing is saved; run inside the repository")
    folder = RESULTS / re.sub(r"[^a-z0-9]+", "-", record["environment"]["device"].lower())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def print_now(line: str) -> None:
    """Print a line at once: a run cut short leaves what it measured."""
    print(line, flush=True)


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else ""
