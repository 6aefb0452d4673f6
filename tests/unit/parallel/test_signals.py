import os
import signal
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from trainer.config.parallel import ParallelConfig
from trainer.parallel.signals import SIGNALS, StopSignal
from trainer.parallel.world import open_world

TWICE = """
import os, signal, time, types
from trainer.parallel import signals
now, seen = 0.0, []
signals.time = types.SimpleNamespace(monotonic=lambda: now)
with signals.StopSignal(has_launcher={has_launcher}) as stop:
    receive = stop._receive
    stop._receive = lambda signum: (receive(signum), seen.append(signum))
    for signum in (signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), signum)
        while signum not in seen: time.sleep(0.001)
        now += {pause}
    print("alive")
"""


def wait_for(stop: StopSignal) -> int | None:
    deadline = time.monotonic() + 60
    while stop.received is None and time.monotonic() < deadline:
        time.sleep(0.001)
    return stop.received


@pytest.fixture
def one_rank():
    with open_world(ParallelConfig(device="cpu")):
        yield
    assert not dist.is_initialized()


@pytest.mark.parametrize("signum", SIGNALS)
def test_first_signal_is_agreed_and_stops_nothing(one_rank, signum):
    with StopSignal(has_launcher=False) as stop:
        assert stop.agreed() is None
        os.kill(os.getpid(), signum)
        assert wait_for(stop) == signum
        assert stop.agreed() == signum


def test_handlers_from_before_return():
    before = [signal.getsignal(signum) for signum in SIGNALS]
    with StopSignal(has_launcher=False):
        assert [signal.getsignal(signum) for signum in SIGNALS] != before
    assert [signal.getsignal(signum) for signum in SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_signal_is_seen_while_the_main_thread_sits_in_foreign_code():
    """A lock held in C stands for a collective: no Python handler runs meanwhile."""
    code = (
        "import ctypes, os, signal, threading, time\n"
        "from trainer.parallel.signals import StopSignal\n"
        "def watch():\n"
        "    while stop.received is None: time.sleep(0.001)\n"
        "    print(stop.received, flush=True)\n"
        "    os._exit(0)\n"
        "with StopSignal(has_launcher=False) as stop:\n"
        "    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
        "    threading.Thread(target=watch).start()\n"
        "    sleep = ctypes.CDLL(None).sleep\n"
        "    while True: sleep(30)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == str(int(signal.SIGTERM)), run.stderr


@pytest.mark.parametrize(
    ("has_launcher", "pause", "status"),
    [(False, 0.1, 130), (True, 0.1, 0), (True, 1.2, 130)],
    ids=["second signal ends at once", "launcher's echo is the same signal", "later is a second"],
)
def test_second_signal(has_launcher, pause, status):
    code = TWICE.format(has_launcher=has_launcher, pause=pause)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == status, run.stderr
    assert ("alive" in run.stdout) == (status == 0)
