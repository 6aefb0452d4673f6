"""SIGTERM and SIGINT: a wish to stop that all ranks agree on at the end of a step.

Owns the handlers while a run lasts. A Python handler does not run while the main thread sits in a
collective, so signals are read by a thread, from the file descriptor that the interpreter's C
handler writes to.
"""

import logging
import os
import signal
import socket
import threading
import time
from types import FrameType, TracebackType
from typing import Self

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ECHO_S = 1.0
"""Under a launcher one Ctrl-C arrives twice, from the terminal and from the launcher."""


class StopSignal:
    """Counts stop signals: the first asks for an ordered end, the second ends at once.

    Use as a context manager, on the main thread. The handlers from before return at its end.

    Args:
        has_launcher: Whether torchrun or another launcher passes signals on: then a second one
            within a second of the first counts as the same.

    Example:
        with StopSignal(has_launcher=world.size > 1) as stop:
            for batch in batches:
                ...
                if (signum := stop.agreed()) is not None:
                    save()
                    raise Interrupted(signum)
    """

    def __init__(self, *, has_launcher: bool) -> None:
        self._echo_s = ECHO_S if has_launcher else 0.0
        self._signum = 0
        self._first_at = 0.0
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._thread = threading.Thread(target=self._read, name="signals", daemon=True)

    def __enter__(self) -> Self:
        """Install the handlers."""
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._old_handlers = {signum: signal.signal(signum, _ignore) for signum in SIGNALS}
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put the handlers from before back."""
        signal.set_wakeup_fd(self._old_fd)
        for signum, handler in self._old_handlers.items():
            signal.signal(signum, handler)
        self._writer.close()
        self._thread.join()
        self._reader.close()

    @property
    def received(self) -> int | None:
        """The signal that this rank received, before any agreement."""
        return self._signum or None

    def agreed(self) -> int | None:
        """Return the signal that any rank received, the same on all; None if there was none.

        Collective: the whole world, one all-reduce of a host integer over gloo (no device waits);
        every rank must call, once a step.
        """
        signum = torch.tensor(self._signum, dtype=torch.int32)
        dist.all_reduce(signum, op=dist.ReduceOp.MAX)
        return int(signum) or None

    def _read(self) -> None:
        while received := self._reader.recv(64):
            for signum in received:
                if signum in SIGNALS:
                    self._receive(signum)

    def _receive(self, signum: int) -> None:
        name = signal.Signals(signum).name
        if not self._signum:
            self._signum, self._first_at = signum, time.monotonic()
            logger.warning("%s: stopping after this step, with a checkpoint", name)
        elif time.monotonic() - self._first_at >= self._echo_s:
            logger.warning("%s again: stopping at once, without a checkpoint", name)
            os._exit(128 + signum)


def _ignore(signum: int, frame: FrameType | None) -> None:
    """Do nothing: a handler must be there for the interpreter to write the signal down."""
