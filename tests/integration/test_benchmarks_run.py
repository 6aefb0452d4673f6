"""Every benchmark script runs on a CPU at tiny shapes and ends in one JSON object."""

import json
import subprocess
import sys
from pathlib import Path

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
