"""Does Muon earn its place? AdamW and Muon at the demo's scale, and what must not matter.

    python -m scripts.study.optimizers --out outputs/study            the whole study
    python -m scripts.study.optimizers --out outputs/study --short    its shortest form, as CI runs
    python -m scripts.study.optimizers --out outputs/study --publish  and puts it into docs/

Tune, at seed 0 and for both optimizers alike, in two goes: first the rate of matrices, where the
rest (embeddings, head, norms) goes along under AdamW and is at AdamW's best under Muon; then the
rate of the rest. One grid serves both, since Muon's updates have the size of AdamW's at equal rates
(`adjust_lr = "rms_norm"`). Warm-up, decay, weight decay, clipping and betas are the same. Compare:
the winners of each go over several seeds.
Overlay: `impl`, `kernel` and sharding on one seed, whose curves must coincide, or in bfloat16 lie
as near as its rounding allows.

Runs one after another, one CPU thread a rank; a run that is finished in `--out` is not repeated, so
the study can be interrupted. Time is steps by the fastest step of an optimizer's runs: other work
on the machine makes single steps several times slower. Ends with figures, table and one JSON line;
`report.py` draws them.
"""

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench.records import describe_environment
from scripts.study.report import draw_comparison, draw_overlay, table

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "pretraining.md"
FIGURES = ROOT / "docs" / "pretraining"
MARKS = (
    "<!-- study: written by scripts/study/optimizers.py --publish -->",
    "<!-- /study -->",
)
LOG = "optimizers.log"
RESULTS = Path(__file__).parent / "results"
CONFIG = ROOT / "configs" / "pretrain" / "demo.toml"
TUNED_LRS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032)
TUNED_REST_LRS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128)
SETTINGS = {
    "adamw": ("--optim.type", "adamw", "--optim.weight-decay", "0.01"),
    "muon": (),
}
WIDE = (
    *("--model.architecture.hidden-size", "192"),
    *("--model.architecture.num-key-value-heads", "4"),
    *("--model.architecture.moe-intermediate-size", "128"),
    *("--optim.split-gate-up", "true"),
)
"""Every matrix but the routers is 128x192 or 192x128: `gram` fuses two of its rows in bfloat16."""
_FP32 = (*WIDE, "--optim.kernel", "dense", "--optim.ns-dtype", "float32")
_BF16 = (*WIDE, "--optim.ns-dtype", "bfloat16", "--optim.kernel")
_TWO_REPLICAS = ("--parallel.dp-replicate", "2")
OVERLAYS: dict[str, dict[str, tuple[int, tuple[str, ...]]]] = {
    "the demo's shapes, float32": {
        "stacked, 1 rank": (1, ()),
        "per_matrix": (1, ("--optim.impl", "per_matrix")),
        "stacked, 1 rank, micro-batches of 2": (1, ("--data.micro-batch-size", "2")),
        "2 ranks, fsdp": (2, ("--parallel.dp-shard", "2")),
        "2 ranks, ep 2": (2, ("--parallel.dp-shard", "2", "--parallel.ep", "2")),
        "2 ranks, replicas": (2, (*_TWO_REPLICAS, "--parallel.dp-shard", "1")),
        "4 ranks, replicas of ep 2": (
            4,
            (*_TWO_REPLICAS, "--parallel.dp-shard", "2", "--parallel.ep", "2"),
        ),
    },
    "wide shapes": {
        "dense, float32": (1, _FP32),
        "dense, bfloat16": (1, (*_BF16, "dense")),
        "gram, bfloat16": (1, (*_BF16, "gram")),
        "gram, bfloat16, 2 ranks, ep 2": (
            2,
            (*_BF16, "gram", "--parallel.dp-shard", "2", "--parallel.ep", "2"),
        ),
    },
}
"""By what is to coincide: its first run is what the others are compared with."""


@dataclass(frozen=True)
class Trial:
    """One run of the study.

    Attributes:
        name: Of its folder.
        flags: After the config.
        num_ranks: Processes.
        num_steps: Optimizer steps.
        module: Run by Python, with its first words.
    """

    name: str
    flags: tuple[str, ...]
    num_ranks: int
    num_steps: int
    module: str = "trainer"


def main() -> None:
    """Run what is missing, then report."""
    arguments = parse_arguments()
    out = Path(arguments.out)
    lrs = TUNED_LRS[2:3] if arguments.short else TUNED_LRS
    tuned: dict[str, dict[float, float]] = {}
    first: dict[str, float] = {}
    best: dict[str, tuple[str, tuple[float, float]]] = {}
    for name in SETTINGS:
        rates = {lr: (lr, first.get("adamw", lr)) for lr in lrs}
        tuned[name] = tune(out, name, rates, arguments.steps)
        first[name] = lr = min(rates, key=tuned[name].__getitem__)
        best[name] = (name, rates[lr])
    for name in SETTINGS if not arguments.short else ():
        rates = {rest: (first[name], rest) for rest in TUNED_REST_LRS}
        tuned[f"{name}, rest"] = tune(out, name, rates, arguments.steps)
        rest = min(rates, key=tuned[f"{name}, rest"].__getitem__)
        best[f"{name}, rest tuned too"] = (name, rates[rest])
    compared = {
        label: [
            run(out, trial(name, rates, seed, arguments.steps))
            for seed in range(num_seeds(arguments, is_first_go=label == name))
        ]
        for label, (name, rates) in best.items()
    }
    overlaid = {
        group: {
            name: run(out, overlay_trial(f"{group} {name}", first, *how, arguments.overlay_steps))
            for name, how in list(ways.items())[: 2 if arguments.short else None]
        }
        for group, ways in list(OVERLAYS.items())[: 1 if arguments.short else None]
    }
    record = summarize(arguments, tuned, first, best, compared, overlaid)
    report(out, record)
    if arguments.publish:
        publish(out)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", required=True, help="folder of the runs and the report")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--overlay-steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3, help="of the winners of the first go")
    parser.add_argument("--rest-seeds", type=int, default=3, help="of the winners of the second")
    parser.add_argument("--short", action="store_true", help="one rate, one seed, one overlay")
    parser.add_argument("--publish", action="store_true", help="copy the report into docs/")
    return parser.parse_args()


def num_seeds(arguments: argparse.Namespace, *, is_first_go: bool) -> int:
    """Return over how many seeds a winner runs."""
    if arguments.short:
        return 1
    return arguments.seeds if is_first_go else arguments.rest_seeds


def tune(
    out: Path, optimizer: str, rates: dict[float, tuple[float, float]], num_steps: int
) -> dict[float, float]:
    """Return the validation loss at seed 0 of each pair of rates, under the pair's key."""
    return {
        key: final_loss(run(out, trial(optimizer, pair, 0, num_steps)))
        for key, pair in rates.items()
    }


def trial(optimizer: str, rates: tuple[float, float], seed: int, num_steps: int) -> Trial:
    """Return the run of an optimizer at its rates, of matrices and of the rest, and a seed."""
    lr, rest = rates
    flags = (*SETTINGS[optimizer], "--optim.lr", str(lr), "--seed", str(seed))
    module = "trainer"
    if optimizer == "muon":
        flags += ("--optim.adamw-lr", str(rest))
    elif rest != lr:
        module = f"scripts.study.two_rates {rest}"
    name = f"{optimizer}-lr{lr}-rest{rest}-seed{seed}-{num_steps}"
    return Trial(name, flags, 1, num_steps, module)


def overlay_trial(
    name: str, first: dict[str, float], num_ranks: int, flags: tuple[str, ...], num_steps: int
) -> Trial:
    """Return the run of one way to compute the same, at the rates that won first."""
    label = "-".join(re.findall(r"\w+", name))
    lr, rest = first["muon"], first["adamw"]
    rates = ("--optim.lr", str(lr), "--optim.adamw-lr", str(rest))
    return Trial(
        f"overlay-{label}-lr{lr}-rest{rest}-{num_steps}", (*rates, *flags), num_ranks, num_steps
    )


def final_loss(lines: list[dict[str, Any]]) -> float:
    """Return the validation loss at the end of a run; infinite if it had become NaN."""
    loss = lines[-1]["val/loss"]
    return float("inf") if loss is None else loss


def run(out: Path, trial: Trial) -> list[dict[str, Any]]:
    """Return the metrics of a trial, running it if it is not there."""
    folder = out / "runs" / trial.name
    lines = read_metrics(folder)
    if not lines or lines[-1]["step"] < trial.num_steps:
        shutil.rmtree(folder, ignore_errors=True)
        began = time.perf_counter()
        launch(trial, folder)
        lines = read_metrics(folder)
        loss, val_loss = lines[-1]["loss/mean"], lines[-1]["val/loss"]
        seconds = time.perf_counter() - began
        say(out, f"{trial.name}: loss {loss:.4f}, validation {val_loss:.4f}, {seconds:.0f} s")
    return lines


def say(out: Path, line: str) -> None:
    """Print a line and add it to the study's log."""
    print(line, flush=True)
    with (out / LOG).open("a") as log:
        log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} {line}\n")


def launch(trial: Trial, folder: Path) -> None:
    """Run `trainer pretrain` in processes of its own."""
    ranks = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={trial.num_ranks}")
    interval = max(1, trial.num_steps // 6)
    command = [
        *(sys.executable, *(ranks if trial.num_ranks > 1 else ())),
        *("-m", *trial.module.split(), "pretrain", "@", str(CONFIG), *trial.flags),
        *("--output-dir", str(folder), "--max-steps", str(trial.num_steps)),
        *("--val.prompts", "[]", "--val.interval", str(interval), "--val.max-packs", "16"),
        *("--wandb.enabled", "false", "--ckpt.interval", "0"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.log").open("w") as log:
        subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=log, stderr=log)
    for heavy in ("checkpoints", "weights"):
        shutil.rmtree(folder / heavy)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return a run's metrics; empty if it has none."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summarize(
    arguments: argparse.Namespace,
    tuned: dict[str, dict[float, float]],
    first: dict[str, float],
    best: dict[str, tuple[str, tuple[float, float]]],
    compared: dict[str, list[list[dict[str, Any]]]],
    overlaid: dict[str, dict[str, list[dict[str, Any]]]],
) -> dict[str, Any]:
    """Return what the study found, as JSON."""
    import torch

    return {
        **describe_environment(torch.device("cpu")),
        "config": str(CONFIG.relative_to(ROOT)),
        "steps": arguments.steps,
        "tuning": {
            name: {str(lr): loss if math.isfinite(loss) else None for lr, loss in losses.items()}
            for name, losses in tuned.items()
        },
        "best_lr": {label: rates for label, (_, rates) in best.items()},
        "overlay_lr": first["muon"],
        "step_seconds": fastest(best, compared, "time/step"),
        "optimizer_seconds": fastest(best, compared, "time/optimizer"),
        "compared": {name: [curve(lines) for lines in runs] for name, runs in compared.items()},
        "overlaid": {
            group: {name: curve(lines)["loss"] for name, lines in ways.items()}
            for group, ways in overlaid.items()
        },
    }


def fastest(
    best: dict[str, tuple[str, tuple[float, float]]],
    compared: dict[str, list[list[dict[str, Any]]]],
    metric: str,
) -> dict[str, float]:
    """Return an optimizer's least time of all steps: what else the machine does only slows it."""
    least = {name: math.inf for name in SETTINGS}
    for label, (name, _) in best.items():
        least[name] = min([least[name], *(line[metric] for run in compared[label] for line in run)])
    return {label: least[name] for label, (name, _) in best.items()}


def curve(lines: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return losses over tokens, and what was evaluated."""
    evaluated = [line for line in lines if line.get("val/loss") is not None]
    return {
        "tokens": [line["progress/num_tokens"] for line in lines],
        "loss": [line["loss/mean"] for line in lines],
        "val_steps": [line["step"] for line in evaluated],
        "val_tokens": [line["progress/num_tokens"] for line in evaluated],
        "val_loss": [line["val/loss"] for line in evaluated],
        "val_bits_per_byte": [line["val/bits_per_byte"] for line in evaluated],
    }


def report(out: Path, record: dict[str, Any]) -> None:
    """Write figures, table and JSON into `out`; the last line of output is the JSON's summary."""
    draw_comparison(record, out / "optimizers.png")
    draw_overlay(record, out / "overlay.png")
    (out / "optimizers.json").write_text(json.dumps(record) + "\n")
    text = table(record)
    (out / "table.md").write_text(text)
    print(text)
    print(json.dumps({name: record[name] for name in ("commit", "steps", "best_lr", "tuning")}))


def publish(out: Path) -> None:
    """Copy JSON, log and figures to where they are kept; put the table into the docs."""
    RESULTS.mkdir(exist_ok=True)
    FIGURES.mkdir(exist_ok=True)
    for name in ("optimizers.json", LOG):
        shutil.copy(out / name, RESULTS)
    for name in ("optimizers.png", "overlay.png"):
        shutil.copy(out / name, FIGURES)
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    figures = "\n".join(
        f"![{title}](pretraining/{name}.png)"
        for title, name in (("validation loss", "optimizers"), ("training loss", "overlay"))
    )
    body = f"\n\n{(out / 'table.md').read_text()}\n{figures}\n\n"
    PAGE.write_text(before + MARKS[0] + body + MARKS[1] + after)


if __name__ == "__main__":
    main()
