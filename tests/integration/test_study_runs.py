"""The short form of the optimizer study runs from nothing to figures, table and JSON."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[2]
MODULE = "scripts.study.optimizers"


def test_short_study_reports_and_does_not_repeat_finished_runs(tmp_path):
    short = ["--out", str(tmp_path), "--short", "--steps", "2", "--overlay-steps", "2"]
    command = [sys.executable, "-m", MODULE, *short]
    first = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert first.returncode == 0, first.stderr[-3000:]
    record = json.loads((tmp_path / "optimizers.json").read_text())
    assert record["best_lr"] == {"adamw": 0.002, "muon": 0.01}
    assert record["overlaid"]["impl per_matrix"] == pytest.approx(
        record["overlaid"]["impl stacked, 1 rank"], abs=1e-4
    )
    assert {"optimizers.png", "overlay.png", "table.md"} <= {p.name for p in tmp_path.iterdir()}
    log = (tmp_path / "optimizers.log").read_text()
    assert len(log.splitlines()) == 4, "one run an optimizer, one an overlaid setting"
    again = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert again.returncode == 0, again.stderr[-3000:]
    assert (tmp_path / "optimizers.log").read_text() == log
    assert json.loads(again.stdout.splitlines()[-1])["steps"] == 2
