"""`trainer` and `python -m trainer`, which is what `torchrun -m trainer sft …` starts."""

import contextlib
import sys

from trainer.cli.interrupts import ended_by_signals

RUNS = ("sft", "rl", "pretrain")


def main() -> int:
    """Run the command of this process; returns its exit status."""
    args = sys.argv[1:]
    with ended_by_signals() if args[:1] and args[0] in RUNS else contextlib.nullcontext():
        # Imported here: a signal may come while it is.
        from trainer.cli.main import main as run

        return run(args)


if __name__ == "__main__":
    sys.exit(main())
