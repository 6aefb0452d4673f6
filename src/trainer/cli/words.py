"""Words of the commands that take no config: places first, then named options."""

from collections.abc import Mapping
from dataclasses import dataclass

from trainer.config.base import path_in_full
from trainer.errors import UserError


@dataclass(frozen=True)
class Words:
    """Places in order, and options by name without dashes."""

    places: list[str]
    options: dict[str, str]


def place(name: str, text: str) -> str:
    """Return a file or folder as a shell would give it, which in `--name=~/x` it does not.

    Raises:
        UserError: there can be no such file; names it as `name`.
    """
    try:
        return path_in_full(text)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None


def split_words(args: list[str], known: Mapping[str, str]) -> Words:
    """Split words into places and options (`--name VALUE` or `--name=VALUE`).

    Args:
        args: As typed.
        known: Allowed options, without dashes, and their defaults.

    Raises:
        UserError: an option is unknown or has no value.
    """
    places: list[str] = []
    options = dict(known)
    remaining = iter(args)
    for word in remaining:
        if not word.startswith("--"):
            places.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("_", "-")
        if name not in known:
            allowed = ", ".join(f"--{option}" for option in known)
            raise UserError(f"--{name}: no such option; options here are {allowed}")
        options[name] = value if equals else next(remaining, "")
        if not options[name]:
            raise UserError(f"--{name}: no value given; write --{name} VALUE")
    return Words(places, options)
