"""Every benchmark script runs on a CPU at tiny shapes and ends in one JSON object."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainer.optim.kernels.products import Products, torch_products
from trainer.optim.kernels.symmetric import Tiles

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


def test_newton_schulz_prints_errors_then_times_then_one_json_object():
    command = [sys.executable, str(BENCH / "newton_schulz.py"), "--tiny", "--device", "cpu"]
    command += ["--seconds", "0.01", "--kernels", "auto", "gram"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    block = next(i for i, line in enumerate(lines) if line == "bfloat16 2x16x24")
    assert "gaussian" in lines[block + 1]
    assert " ms " in next(
        line for line in lines[block:] if line.startswith("  auto  ") and "±" in line
    )
    record = json.loads(lines[-1])
    assert record["benchmark"] == "newton_schulz"
    assert {row["dtype"] for row in record["rows"]} == {"bfloat16", "float16"}
    assert {row["variant"] for row in record["rows"]} >= {"auto", "gram", "eager"}
    assert set(record["rows"][0]["errors"]) >= {"rank_1", "one_large_row", "largest_singular_value"}


def test_tiles_are_compared_within_the_iteration(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import tile_search

    given = []

    def stand_in(_, tiles: Tiles) -> Products:
        given.append(tiles)
        if tiles.general.rows == 256:
            raise ValueError("no such tile")
        return torch_products()

    monkeypatch.setattr(tile_search, "quack_products", stand_in)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    cpu = torch.device("cpu")
    wide, tall = [
        tile_search.search_tiles(shape, torch.bfloat16, cpu, 0.01)
        for shape in [(2, 16, 24), (2, 48, 16)]
    ]
    names = [{row["tiles"] for row in rows} for rows in (wide, tall)]
    for given_names in names:
        assert given_names >= {"in use", "static schedule", "general by torch", "as quack_seed"}
        general = [name for name in given_names if name.startswith("general ")]
        assert 1 < len(general) < 1 + len(tile_search.RECTANGLES), "some are refused"
    assert "symmetric 128x256, cluster 2x1" in names[0] & names[1]
    assert names[0] - names[1] == {"symmetric 192x192, cluster 1x1"}, "not of a tall stack"
    times = [row["median_ms"] for row in wide]
    assert times == sorted(times)
    assert {tiles.symmetric for tiles in given} >= set(tile_search.SQUARES)


def test_muon_step_compares_the_variants_that_can_run_at_each_ep():
    command = [sys.executable, str(BENCH / "muon_step.py"), "--tiny", "--device", "cpu"]
    command += ["--ep", "8", "2", "--warm-up", "1", "--steps", "2"]
    command += ["--variants", "ours", "adamw", "dion_quack"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ep 8 ours ")
    record = json.loads(lines[-1])
    assert [(row["ep"], row["variant"]) for row in record["rows"]] == [
        (8, "ours"),
        (8, "adamw"),
        (2, "ours"),
        (2, "adamw"),
    ]
    assert all(row["median_s"] > 0 for row in record["rows"])
    assert any("dion_quack: skipped" in line for line in lines)
    assert set(record["summary"]["speedups"]) == {"ep 8: adamw / ours", "ep 2: adamw / ours"}


def test_train_step_compares_our_step_with_transformers_own():
    command = [sys.executable, str(BENCH / "train_step.py"), "--tiny", "--device", "cpu"]
    command += ["--layers", "1", "--tokens", "32", "--seq-len", "16", "--memory-lengths", "16"]
    command += ["--warm-up", "1", "--steps", "2", "--variants", "ours", "transformers"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert [row["variant"] for row in record["rows"]] == ["ours", "transformers"]
    assert all(0 < row["optimizer_share"] < 1 for row in record["rows"])
    assert record["peak_gib_by_tokens"].keys() == {"16"}
    assert record["summary"].keys() == {"eager"}


@pytest.mark.distributed
def test_train_step_deals_its_packs_to_real_ranks():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += ["2", str(BENCH / "train_step.py"), "--tiny", "--device", "cpu", "--layers", "1"]
    command += ["--tokens", "64", "--seq-len", "16", "--ep", "2"]
    command += ["--warm-up", "1", "--steps", "1", "--variants", "ours", "transformers"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["num_ranks"] == 2
    assert [row["variant"] for row in record["rows"]] == ["ours", "transformers"]
    for row in record["rows"]:
        assert row["tokens_per_s"] * row["median_s"] == pytest.approx(64)


def test_the_tables_of_the_performance_page_are_the_records():
    command = [sys.executable, str(BENCH / "page.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
