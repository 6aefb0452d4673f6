import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.tiny import write_tiny_run

ENDLESS = ["--max-steps", "1000000", "--scheduler.type", "constant"]
TIMEOUT_S = 120.0


def start(words: list[str], *launcher: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*(launcher or (sys.executable,)), "-m", "trainer", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Wait until `metrics.jsonl` holds a step."""
    deadline = time.monotonic() + TIMEOUT_S
    path = folder / "run" / "metrics.jsonl"
    while not path.exists() or path.read_text().count("\n") < step:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "no step within the time limit"
        time.sleep(0.05)


def end_with(process: subprocess.Popen[str], signum: int) -> int:
    """Send a signal and return the exit status."""
    process.send_signal(signum)
    try:
        process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
    return process.returncode


def last_saved(folder: Path) -> int:
    names = [path.name for path in (folder / "run" / "checkpoints").glob("step_*")]
    return max(int(name.removeprefix("step_")) for name in names)


def steps(folder: Path) -> list[int]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_one_process(tmp_path, asynchronous):
    words = [*write_tiny_run(tmp_path), *ENDLESS, "--ckpt.asynchronous", asynchronous]
    process = start(words)
    wait_for_step(tmp_path, 2, process)
    assert end_with(process, signal.SIGTERM) == 143
    saved = last_saved(tmp_path)
    assert steps(tmp_path) == list(range(1, saved + 1))

    resumed = start([*words, "--ckpt.resume", "latest"])
    wait_for_step(tmp_path, saved + 2, resumed)
    assert end_with(resumed, signal.SIGINT) == 130
    assert last_saved(tmp_path) > saved
    assert steps(tmp_path) == list(range(1, last_saved(tmp_path) + 1))


@pytest.mark.distributed
def test_two_ranks_under_torchrun(tmp_path):
    words = [*write_tiny_run(tmp_path), *ENDLESS, "--parallel.ep", "2"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    process = start(words, *launcher, "--nproc-per-node", "2")
    wait_for_step(tmp_path, 2, process)
    # torchrun's own status after a signal is not the workers'.
    assert end_with(process, signal.SIGTERM) != 0
    assert steps(tmp_path) == list(range(1, last_saved(tmp_path) + 1))
