"""Signals that come before a run can save: the process ends at once, with the signal's status.

Owns SIGTERM and SIGINT while a training command starts (imports, data, the wait for other ranks)
and after its last save. While it trains they are `trainer.parallel.signals`'. Imports no torch.
"""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """End the process with 128 + signum on the first signal; for the main thread.

    A thread reads the signals: a Python handler would wait for imports and collectives to return.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    old_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    old_handlers = {signum: signal.signal(signum, _ignore) for signum in SIGNALS}
    threading.Thread(target=_end_on_signal, args=(reader,), name="start", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(old_fd)
        for signum, handler in old_handlers.items():
            signal.signal(signum, handler)
        writer.close()


def _end_on_signal(reader: socket.socket) -> None:
    with reader:
        while received := reader.recv(64):
            for signum in received:
                if signum in SIGNALS:
                    os._exit(128 + signum)


def _ignore(signum: int, frame: FrameType | None) -> None:
    """Do nothing: a handler must be there for the interpreter to write the signal down."""
