"""The commands that start a run: their names, their configs and their loops.

Imports nothing until it is asked for: the entry point needs the names before all else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config import RunConfig

RUNS = ("sft", "rl", "pretrain")


def config_class(command: str) -> type[RunConfig]:
    """Return the config class of a run's command."""
    match command:
        case "sft":
            from trainer.config import SFTConfig

            return SFTConfig
        case "rl":
            from trainer.config import RLConfig

            return RLConfig
        case "pretrain":
            from trainer.config.pretrain import PretrainConfig

            return PretrainConfig
    raise AssertionError(command)


def run_function(command: str) -> Callable[..., None]:
    """Return what trains for a run's command, given its config."""
    match command:
        case "sft":
            from trainer.loops.sft import run_sft

            return run_sft
        case "rl":
            from trainer.loops.rl import run_rl

            return run_rl
        case "pretrain":
            from trainer.loops.pretrain import run_pretrain

            return run_pretrain
    raise AssertionError(command)
