"""From command-line arguments to one validated config.

Owns the order of layers: defaults, then files in the order given, then flags. Words become
layers in `arguments.py`, layers one table in `compose.py`, refusals messages in `explain.py`.
`dump.py` writes what this loads.
"""

import copy
import datetime
import math
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from trainer.config.arguments import flag_layer, section_layer, split_arguments
from trainer.config.compose import COMMAND_LINE, DEFAULTS, Composition, default_layer
from trainer.config.explain import explain
from trainer.config.files import read_config_file
from trainer.errors import UserError

Config = TypeVar("Config", bound=BaseModel)


def load_config(cls: type[Config], args: list[str]) -> tuple[Config, list[str]]:
    """Compose files and flags and validate them once.

    Args:
        cls: The config class.
        args: Words as typed: `@ FILE`, `--section @ FILE`, `--section.field VALUE …`.

    Returns:
        The config, and notes about keys that a change of a section's type dropped.

    Raises:
        UserError: a file cannot be read, a word is not understood, or a value is refused; names
            every refused field, its value, the rule and the remedy.

    Example:
        config, notes = load_config(SFTConfig, ["@", "configs/sft/demo.toml", "--seed", "1"])
    """
    files, flags = split_arguments(args)
    composition = Composition(cls)
    composition.add(default_layer(cls), DEFAULTS)
    for file in files:
        layer = section_layer(file.section, read_config_file(file.path))
        composition.add(layer, f"in {file.path}")
    composition.add(flag_layer(cls, flags, composition.values), COMMAND_LINE)
    _refuse_odd_values(composition.values, "")
    try:
        # The library's validators write into the table they are given.
        config = cls.model_validate(copy.deepcopy(composition.values))
    except ValidationError as error:
        message = explain(error, cls, composition.values, composition.origins)
        raise UserError(message) from None
    return config, composition.notes


def _refuse_odd_values(value: Any, path: str) -> None:
    """Refuse what no field takes and free tables would let through: nan, dates, NUL."""
    match value:
        case dict():
            for key, item in value.items():
                _refuse_odd_values(item, f"{path}.{key}".lstrip("."))
        case list():
            for index, item in enumerate(value):
                _refuse_odd_values(item, f"{path}[{index}]")
                if item is None:
                    raise UserError(f"{path}[{index}]=None: a list holds no None; leave it out")
        case float() if not math.isfinite(value):
            raise UserError(f"{path}={value}: must be a finite number; correct it")
        case str() if not _is_writable(value):
            raise UserError(
                f"{path}={value!r}: holds a character that no file can be named by or say "
                "(NUL, or bytes that are not UTF-8); remove it"
            )
        case datetime.date() | datetime.time():
            raise UserError(f"{path}={value}: dates are no config values; put it in quotes")
        case _:
            pass


def _is_writable(text: str) -> bool:
    is_unicode = not any("\ud800" <= character <= "\udfff" for character in text)
    return is_unicode and "\0" not in text
