import os
import subprocess
import sys
import tomllib

import pytest

SPINNING = """
import contextlib, sys, threading
from datetime import timedelta
import torch.distributed as dist
import trainer.cli.main
from trainer.__main__ import main

store = dist.HashStore()

def spin():
    while True:
        with contextlib.suppress(dist.DistStoreError):
            store.wait(["never"], timedelta(milliseconds=1))

def run(args):
    for _ in range(4):
        threading.Thread(target=spin, daemon=True).start()
    print("said", end="")
    if args[1] == "raise":
        raise RuntimeError("broken")
    return int(args[1])

trainer.cli.main.main = run
sys.exit(main())
"""


@pytest.mark.parametrize(("ending", "status"), [("0", 0), ("2", 2), ("143", 143), ("raise", 1)])
def test_status_stands_though_threads_are_left_inside_the_process_group(ending, status):
    """The interpreter's own end would abort here, each time (status -6)."""
    ended = subprocess.run(
        [sys.executable, "-c", SPINNING, "sft", ending], capture_output=True, text=True
    )
    assert ended.returncode == status, ended.stderr
    assert ended.stdout == "said"
    assert ("RuntimeError: broken" in ended.stderr) == (ending == "raise")
    assert "terminate" not in ended.stderr


def test_exit_handlers_of_others_run_before_the_end():
    code = SPINNING.replace("def run(args):", "def run(args):\n    atexit.register(print, 'last')")
    ended = subprocess.run(
        [sys.executable, "-c", "import atexit" + code, "sft", "2"],
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (2, "saidlast\n")


DRY_RUN = ["sft", "@", "configs/sft/demo.toml", "--dry-run"]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_end_no_command(closed):
    command = f'"$0" -m trainer "$@" {closed}'
    ended = subprocess.run(["bash", "-c", command, sys.executable, *DRY_RUN], capture_output=True)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_text_that_the_output_lacks_is_written_as_toml_escapes():
    ended = subprocess.run(
        [sys.executable, "-m", "trainer", *DRY_RUN, "--output-dir", "日本😀"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert ended.returncode == 0
    assert tomllib.loads(ended.stdout.decode())["output_dir"] == "日本😀"


def test_output_that_cannot_be_written_fails_the_run_with_a_message():
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "trainer", *DRY_RUN],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": ""},
        )
    assert ended.returncode == 1
    assert "standard output cannot be written" in ended.stderr
