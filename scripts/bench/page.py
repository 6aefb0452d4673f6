#!/usr/bin/env python
"""Write the tables and plots of docs/performance.md from the records under results/.

A number on that page exists once, in a record; a table stands between `<!-- table: NAME -->` and
`<!-- end -->`, and everything else on the page is written by hand.

    python scripts/bench/page.py            # rewrite the page and its plots
    python scripts/bench/page.py --check    # exit 1 if the page's tables are not the records'
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "nvidia-h200"
DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "performance.md"
INPUTS = ("gaussian", "rank_1", "rank_4", "rank_64_noise", "spectrum_1e-6", "one_large_row")
PHASES = ("momentum", "newton_schulz", "exchange", "update")

Record = Mapping[str, Any]


def main() -> None:
    """Rewrite or check the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    page = PAGE.read_text()
    fresh = with_tables(page)
    if arguments.check:
        sys.exit("docs/performance.md differs from the records" if fresh != page else 0)
    PAGE.write_text(fresh)
    plot_newton_schulz(read("newton_schulz"), DOCS / "newton_schulz.png")


def read(name: str) -> Record:
    """Return a record of results/."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def with_tables(page: str) -> str:
    """Return the page with every table made anew."""

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        record, _, part = name.partition("/")
        lines = TABLES[record](read(record), part)
        return f"<!-- table: {name} -->\n" + "\n".join(lines) + "\n<!-- end -->"

    return re.sub(r"<!-- table: (\S+) -->\n.*?<!-- end -->", fill, page, flags=re.DOTALL)


def newton_schulz_table(record: Record, dtype: str) -> list[str]:
    """Return times of one dtype: shapes down, variants across."""
    rows = [row for row in record["rows"] if row["dtype"] == dtype]
    return times_table({(shape_of(row), row["variant"]): row["median_ms"] for row in rows})


def errors_table(record: Record, part: str) -> list[str]:
    """Return errors over those of dense in the same dtype: shapes and kernels down, inputs across.

    Args:
        record: Of newton_schulz.py.
        part: A kernel.
    """
    dense = {
        (shape_of(r), r["dtype"]): r["errors"] for r in record["rows"] if r["variant"] == "dense"
    }
    lines = []
    for row in record["rows"]:
        if row["variant"] == part:
            reference = dense[shape_of(row), row["dtype"]]
            ratios = [row["errors"][name] / reference[name] for name in INPUTS]
            lines.append([shape_of(row), row["dtype"], *(f"{ratio:.2f}" for ratio in ratios)])
    return table([f"{part} / dense", "dtype", *INPUTS], lines)


def tiles_table(record: Record, _: str) -> list[str]:
    """Return an iteration's times: tiles down, shapes across; nothing: not compiled."""
    return times_table({(row["tiles"], shape_of(row)): row["median_ms"] for row in record["tiles"]})


def muon_step_table(record: Record, _: str) -> list[str]:
    """Return the rows of a step benchmark."""
    head = ["ep", "variant", "s a step", "GiB held", "GiB above", "idle", "predicted s", *PHASES]
    lines = [
        [
            str(row["ep"]),
            row["variant"],
            f"{row['median_s']:.4f}",
            f"{row['held_gib']:.1f}",
            f"{row['extra_gib']:.2f}",
            "" if row["idle_share"] is None else f"{row['idle_share']:.1%}",
            number(row["predicted_s"], 4),
            *(number(row["phases_ms"].get(f"optim/{phase}_ms"), 1) for phase in PHASES),
        ]
        for row in record["rows"]
    ]
    return table(head, lines)


def train_step_table(record: Record, _: str) -> list[str]:
    """Return the rows of the full step."""
    head = ["variant", "s a step", "tokens/s", "MFU", "optimizer", "peak GiB", "host syncs"]
    lines = [
        [
            row["variant"],
            f"{row['median_s']:.3f} ± {row['spread_s']:.3f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['mfu']:.1%}",
            f"{row['optimizer_s'] * 1e3:.0f} ms ({row['optimizer_share']:.1%})",
            f"{row['peak_gib']:.1f}",
            str(row["num_syncs"]),
        ]
        for row in record["rows"]
    ]
    return table(head, lines)


def memory_table(record: Record, _: str) -> list[str]:
    """Return the peak by length of a pack."""
    peaks = record["peak_gib_by_tokens"].items()
    return table(["tokens in one pack", "peak GiB"], [[n, f"{gib:.2f}"] for n, gib in peaks])


TABLES: dict[str, Callable[[Record, str], list[str]]] = {
    "newton_schulz": newton_schulz_table,
    "newton_schulz_float16": newton_schulz_table,
    "newton_schulz_models": newton_schulz_table,
    "newton_schulz_baselines": newton_schulz_table,
    "newton_schulz_gram": newton_schulz_table,
    "newton_schulz_float32": newton_schulz_table,
    "newton_schulz_syrk": newton_schulz_table,
    "newton_schulz_tiles": tiles_table,
    "newton_schulz_first_pair": errors_table,
    "muon_step": muon_step_table,
    "muon_step_dion": muon_step_table,
    "muon_step_others": muon_step_table,
    "muon_step_variants": muon_step_table,
    "muon_step_two_gpus": muon_step_table,
    "train_step": train_step_table,
    "train_step_compiled": train_step_table,
    "train_step_two_gpus": train_step_table,
    "train_step_memory": memory_table,
}


def times_table(times_ms: Mapping[tuple[str, str], float]) -> list[str]:
    """Return times by line and column, both in the order in which they come."""
    columns = list(dict.fromkeys(column for _, column in times_ms))
    lines = dict.fromkeys(line for line, _ in times_ms)
    return table(
        ["ms a call", *columns],
        [[line, *(number(times_ms.get((line, c)), 3) for c in columns)] for line in lines],
    )


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table."""
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *lines)]


def shape_of(row: Record) -> str:
    """Return `16x1536x2048`."""
    return "x".join(map(str, row["shape"]))


def number(value: float | None, digits: int) -> str:
    """Return a number, or nothing of None."""
    return "" if value is None else f"{value:.{digits}f}"


def plot_newton_schulz(record: Record, path: Path) -> None:
    """Draw the speed of `auto` over each baseline, by shape and dtype."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    dtypes = list(dict.fromkeys(row["dtype"] for row in record["rows"]))
    figure, axes = pyplot.subplots(1, len(dtypes), figsize=(12, 4), sharey=True, squeeze=False)
    for axis, dtype in zip(axes[0], dtypes, strict=True):
        rows = [row for row in record["rows"] if row["dtype"] == dtype]
        auto = {shape_of(row): row["median_ms"] for row in rows if row["variant"] == "auto"}
        baselines = list(dict.fromkeys(row["variant"] for row in rows if row["is_baseline"]))
        for place, baseline in enumerate(baselines):
            speedups = [
                row["median_ms"] / auto[shape_of(row)] for row in rows if row["variant"] == baseline
            ]
            offsets = [i + 0.25 * (place - 1) for i in range(len(auto))]
            axis.bar(offsets, speedups, width=0.25, label=f"over {baseline}")
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_xticks(range(len(auto)), list(auto), rotation=45, ha="right")
        axis.set_title(f"Newton-Schulz, {dtype}")
        axis.legend()
    axes[0][0].set_ylabel("speed of auto")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
