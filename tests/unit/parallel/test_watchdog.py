import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from trainer.parallel.watchdog import Watchdog


@pytest.fixture
def pair():
    """Two watchdogs whose threads have ended: what they publish, a test does."""
    store = dist.HashStore()
    dogs = [Watchdog(rank, 2, 60.0, store) for rank in range(2)]
    for dog in dogs:
        dog.stop()
    return dogs


def publish(dog: Watchdog) -> None:
    dog._publish(dog.phase)


def test_report_names_the_rank_that_lags_and_its_phase(pair):
    first, second = pair
    for name in ("data", "forward_backward"):
        first.enter(name, True)
    second.enter("data", True)
    publish(second)
    assert "rank 0 is in phase 'forward_backward' (number 2)" in first.report()
    assert "it waits for rank 1, last seen in phase 'data' (number 1)" in first.report()


def test_rank_that_others_wait_for_blames_nobody(pair):
    first, second = pair
    first.enter("data", True)
    publish(first)
    assert "waits for" not in second.report()


def test_phase_is_published_by_the_thread(pair):
    first, _ = pair
    second = Watchdog(1, 2, 1.0, first._store.underlying_store)
    second.enter("save_ckpt", False)
    deadline = time.monotonic() + 60
    while "save_ckpt" not in str(first._others()) and time.monotonic() < deadline:
        time.sleep(0.01)
    second.stop()
    assert first._others()[1].name == "save_ckpt"


def test_its_thread_ends_before_the_interpreter_does():
    """A thread that is killed inside the store's C++ aborts the process (status -6)."""
    code = (
        "import atexit, threading, torch.distributed as dist\n"
        "from trainer.parallel import watchdog\n"
        "atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))\n"
        "watchdog.start(0, 2, 60.0, dist.HashStore())\n"
        "assert 'watchdog' in [thread.name for thread in threading.enumerate()]\n"
        "raise RuntimeError('broken')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "RuntimeError: broken" in ended.stderr
    assert (ended.returncode, ended.stdout) == (1, "['MainThread']\n")
