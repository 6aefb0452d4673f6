"""`trainer` and `python -m trainer`, which is what `torchrun -m trainer sft …` starts.

Owns the beginning and the end of the process; what a command does is `trainer.cli.main`'s.
"""

import atexit
import contextlib
import os
import sys
from contextlib import AbstractContextManager

from trainer.cli.interrupts import ended_by_signals

RUNS = ("sft", "rl", "pretrain")
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


def main() -> int:
    """Run the command of this process; returns its exit status."""
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
