"""`trainer` and `python -m trainer`, which is what `torchrun -m trainer sft …` starts.

Owns the beginning and the end of the process; what a command does is `trainer.cli.main`'s.
"""

import atexit
import contextlib
import io
import os
import sys
from contextlib import AbstractContextManager

from trainer.cli.commands import RUNS
from trainer.cli.interrupts import ended_by_signals

FAILURE = 1


class Ending:
    """The exit status of a training run, given to the system by the last exit handler.

    A failed run leaves threads behind inside collectives. The interpreter's own end would kill
    them there, as they ask for its lock, and C++ answers that with an abort (status 134).
    """

    def __init__(self) -> None:
        self.status = FAILURE
        """What `leave` ends with: a failure until another status is known."""

    def leave(self) -> None:
        """End the process without the interpreter's own end; output is flushed before."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # `main` has said what cannot be written
                stream.flush()
        os._exit(self.status)


def open_streams() -> None:
    """Have standard streams that take any text, so that no output ends a run.

    A closed one would give its number to the next file that is opened, a checkpoint's perhaps.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if vars(sys)[name] is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open to the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main() -> int:
    """Run the command of this process; returns its exit status."""
    open_streams()
    args = sys.argv[1:]
    signals: AbstractContextManager[None] = contextlib.nullcontext()
    ending = Ending()
    if args[:1] and args[0] in RUNS:
        atexit.register(ending.leave)  # registered first, so it runs after all others
        signals = ended_by_signals()
    with signals:
        # Imported here: a signal may come while it is.
        from trainer.cli.main import main as run

        ending.status = run(args)
    return ending.status


if __name__ == "__main__":
    sys.exit(main())
