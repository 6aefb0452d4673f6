"""The `trainer` command: parses, validates, dispatches, turns exceptions into exit statuses.

Imports nothing heavy at the top: `trainer --help` must answer within a second, and a wrong config
must fail before torch is loaded. Read `trainer.loops.sft` for what a run does.
"""

import contextlib
import logging
import os
import signal
import sys
from datetime import timedelta

from trainer.cli import text
from trainer.cli.commands import RUNS, config_class, run_function
from trainer.config import RunConfig, dump_config, load_config
from trainer.errors import Interrupted, UserError
from trainer.seat import Seat, read_seat

DONE, FAILURE, USER_ERROR = 0, 1, 2
NOBODY_READS = 128 + signal.SIGPIPE
DRY_RUN = ("--dry-run", "--dry_run")


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Words after the program's name; None: those of this process.

    Returns:
        The exit status: 0 done, 2 a user's error, 143 and 130 after SIGTERM and SIGINT, 141 where
        the reader of the output has gone (`| head`). A failure of the run is raised, which ends
        the process with 1 and a traceback.
    """
    args = sys.argv[1:] if argv is None else argv
    seat = Seat(0, 1, 0)
    try:
        seat = read_seat()
        _dispatch(args, seat)
    except UserError as error:
        _say(str(error), seat)
        return USER_ERROR
    except Interrupted as interruption:
        return 128 + interruption.signum
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except RuntimeError:
        if not _is_echo(seat):
            raise
        return USER_ERROR
    except OSError:
        # Whether it was standard output that failed shows only when more is written.
        status = _end_output(seat, "\n")
        if status == DONE:
            raise
        return status
    return _end_output(seat, "")


def _end_output(seat: Seat, ending: str) -> int:
    """Write the last of the output; if that fails, the interpreter's own end must not try again."""
    try:
        print(end=ending, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return NOBODY_READS
        _say(f"standard output cannot be written: {error}", seat)
        return FAILURE
    return DONE


def _dispatch(args: list[str], seat: Seat) -> None:
    match args:
        case [] | ["--help" | "-h" | "help", *_]:
            print(text.USAGE)
        case ["--version"]:
            print(text.version())
        case [command, *rest] if command in RUNS:
            _train(command, rest, seat)
        case ["plan", command, *rest] if command in RUNS:
            from trainer.cli.planning.command import plan

            plan(config_class(command), rest)
        case ["plan", *_]:
            raise UserError("plan: say for which command: 'trainer plan sft @ FILE.toml'")
        case ["export", *rest]:
            from trainer.cli.export import export

            export(rest)
        case ["tokenize", *rest]:
            from trainer.cli.tokenize import tokenize_command

            tokenize_command(rest)
        case [unknown, *_]:
            raise UserError(f"{unknown!r}: no such command; {text.COMMANDS_HINT}")


def _train(command: str, args: list[str], seat: Seat) -> None:
    cls = config_class(command)
    if "--help" in args or "-h" in args:
        print(text.command_help(command, cls))
        return
    words = [word for word in args if word not in DRY_RUN]
    is_dry_run = len(words) < len(args)
    config, notes = _load_on_every_rank(cls, words, seat)
    if is_dry_run:
        if seat.is_first:
            print("".join(f"# note: {note}\n" for note in notes) + dump_config(config), end="")
        return
    _start_logging(seat)
    for note in notes:
        logging.getLogger(__name__).warning("%s", note)
    run_function(command)(config)


def _load_on_every_rank(
    cls: type[RunConfig], args: list[str], seat: Seat
) -> tuple[RunConfig, list[str]]:
    try:
        return load_config(cls, args)
    except UserError as error:
        if seat.size > 1:
            from trainer.parallel.world import announce_failed_start

            announce_failed_start(str(error))
        raise


def _say(message: str, seat: Seat) -> None:
    """Print an error once for all ranks that have it."""
    if seat.size > 1:
        from trainer.parallel.world import speaks_for_all

        if not speaks_for_all(timedelta(seconds=10)):
            return
    with contextlib.suppress(BrokenPipeError):
        print(f"error: {message}", file=sys.stderr, flush=True)


def _is_echo(seat: Seat) -> bool:
    """Return whether a failure follows from a user's error that another rank has named."""
    if seat.size == 1:
        return False
    from trainer.parallel.world import another_has_spoken

    return another_has_spoken()


def _start_logging(seat: Seat) -> None:
    logging.basicConfig(
        level=logging.INFO if seat.is_first else logging.WARNING,
        format=f"%(asctime)s rank {seat.rank} %(levelname)s: %(message)s",
        datefmt="%H:%M:%S",
    )
