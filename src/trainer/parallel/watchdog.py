"""Which phase each rank is in, so that a hang or a dead rank is named in the log.

The training thread only notes the phase it enters; a thread beside it publishes the phase to the
store of the process group and ends the run when a phase outlasts `parallel.timeout_s`. Nothing
here is a collective: it must work when collectives do not.
"""

import atexit
import contextlib
import faulthandler
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch.distributed as dist

from trainer.errors import Interrupted, UserError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Phase:
    """What a rank does now.

    `count` grows with every phase entered: among ranks that run the same program, the one with
    the smallest is the one the others wait for.
    """

    name: str
    count: int
    since: float
    """`time.time()` at the start: comparable over ranks of one host, roughly over several."""
    is_timed: bool = True

    def describe(self) -> str:
        """Say which phase, and for how long."""
        return f"phase '{self.name}' (number {self.count}) for {time.time() - self.since:.0f} s"


class Watchdog:
    """Publishes this rank's phase and ends the process when a phase takes too long.

    Args:
        rank: This rank.
        size: Ranks in the world.
        timeout_s: Longest duration of a timed phase, where there are other ranks to wait for.
        store: Where ranks tell each other their phases; None: only this rank's is known.
    """

    def __init__(self, rank: int, size: int, timeout_s: float, store: dist.Store | None) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self._entered = Phase("start", 0, time.time(), is_timed=False), time.monotonic()
        self._store = dist.PrefixStore("phases", store) if store is not None else None
        self._published = -1
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        if size > 1:
            self._thread.start()

    @property
    def phase(self) -> Phase:
        """The phase that this rank is in."""
        return self._entered[0]

    def enter(self, name: str, is_timed: bool) -> None:
        """Note that a phase begins."""
        phase = Phase(name, self.phase.count + 1, time.time(), is_timed)
        self._entered = phase, time.monotonic()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def report(self) -> str:
        """Say where this rank is, and which rank lags behind where that is known."""
        own = f"rank {self.rank} is in {self.phase.describe()}"
        others = self._others()
        if not others:
            return own
        slowest = min(others, key=lambda rank: others[rank].count)
        silent = [rank for rank in range(self.size) if rank != self.rank and rank not in others]
        if others[slowest].count < self.phase.count:
            own += f"; it waits for rank {slowest}, last seen in {others[slowest].describe()}"
        return own + (f"; never heard of: ranks {silent}" if silent else "")

    def _watch(self) -> None:
        interval_s = min(1.0, self.timeout_s / 20)
        while not self._stopped.wait(interval_s):
            phase, entered = self._entered
            self._publish(phase)
            # Not by the clock, which may be set.
            if phase.is_timed and time.monotonic() - entered > self.timeout_s:
                self._end_run()

    def _publish(self, phase: Phase) -> None:
        if self._store is None or phase.count == self._published:
            return
        # The store goes with rank 0 or the launcher; the process group reports that itself.
        with contextlib.suppress(RuntimeError):
            self._store.set(str(self.rank), json.dumps(asdict(phase)))
            self._published = phase.count

    def _others(self) -> dict[int, Phase]:
        phases: dict[int, Phase] = {}
        if self._store is None:
            return phases
        with contextlib.suppress(RuntimeError):
            for rank in range(self.size):
                if rank != self.rank and self._store.check([str(rank)]):
                    phases[rank] = Phase(**json.loads(self._store.get(str(rank))))
        return phases

    def _end_run(self) -> None:
        logger.error(
            "hang: %s, longer than parallel.timeout_s=%g; raise it if the work is that slow",
            self.report(),
            self.timeout_s,
        )
        faulthandler.dump_traceback(all_threads=True)
        # The training thread may sit in a collective for ever: nothing short of this ends it.
        os._exit(1)


_watchdog: Watchdog | None = None


def start(rank: int, size: int, timeout_s: float, store: dist.Store | None) -> None:
    """Start this process's watchdog, in place of one that runs."""
    global _watchdog
    stop()
    _watchdog = Watchdog(rank, size, timeout_s, store)
    # A thread that the interpreter kills inside the store's C++ takes the process down with it.
    atexit.unregister(stop)
    atexit.register(stop)


def stop() -> None:
    """Stop this process's watchdog, if one runs."""
    global _watchdog
    if _watchdog is not None:
        _watchdog.stop()
    _watchdog = None


def set_phase(name: str, *, is_timed: bool = True) -> None:
    """Note what this rank does from now on; costs a few microseconds, talks to nobody.

    Args:
        name: A word for the log, such as 'data', 'forward_backward', 'optimizer'.
        is_timed: False for work that may rightly take longer than `parallel.timeout_s`, such as
            tokenizing or downloading.
    """
    if _watchdog is not None:
        _watchdog.enter(name, is_timed)


@contextlib.contextmanager
def report_failure() -> Iterator[None]:
    """Log this rank's phase, and the rank that lags, when the block ends in a failure."""
    try:
        yield
    except (UserError, Interrupted):
        raise
    except BaseException:
        if _watchdog is not None:
            logger.error("failed: %s", _watchdog.report())
        raise
