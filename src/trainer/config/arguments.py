"""From command-line words to layers: `@ FILE`, `--section @ FILE`, `--section.field VALUE …`.

Flags are text; here each becomes the type of the field it names (`"1e-4"` a number for a number,
text for a text field). What does not convert stays text, and validation refuses it by name.
Spelling a flag with hyphens or underscores is the same.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from trainer.config import schema
from trainer.errors import UserError

INTEGER = re.compile(r"[+-]?[0-9]+(_[0-9]+)*")
NUMBER = re.compile(
    rf"{INTEGER.pattern}(\.[0-9]+(_[0-9]+)*)?([eE]{INTEGER.pattern})?"
    r"|[+-]?\.[0-9]+([eE][+-]?[0-9]+)?|[+-]?[0-9]+\.([eE][+-]?[0-9]+)?|[+-]?(nan|inf|infinity)",
    re.ASCII | re.IGNORECASE,
)
"""As TOML writes them, and `.5` and `1.`; nan and inf are read so that they are refused by name."""


@dataclass(frozen=True)
class FileArgument:
    """A config file and the section it fills ('' for the whole config)."""

    section: str
    path: str


@dataclass(frozen=True)
class Flag:
    """A flag as typed, without its dashes, and the words that follow it."""

    name: str
    words: tuple[str, ...]


def split_arguments(args: list[str]) -> tuple[list[FileArgument], list[Flag]]:
    """Split words into files and flags, each in the order given.

    Raises:
        UserError: a word belongs to neither.
    """
    files: list[FileArgument] = []
    flags: list[Flag] = []
    position = 0
    while position < len(args):
        word = args[position]
        if word.startswith("@"):
            path, position = _file_after(args, position, "@")
            files.append(FileArgument("", path))
        elif not word.startswith("--") or word == "--":
            raise UserError(
                f"unexpected argument {word!r}: a config file is given as '@ FILE', "
                "a field as '--section.field VALUE'"
            )
        elif position + 1 < len(args) and args[position + 1].startswith("@"):
            path, position = _file_after(args, position + 1, f"{word} @")
            files.append(FileArgument(word[2:], path))
        else:
            flag, position = _flag_at(args, position)
            flags.append(flag)
    return files, flags


def _file_after(args: list[str], position: int, what: str) -> tuple[str, int]:
    attached = args[position][1:]
    if attached:
        return attached, position + 1
    following = args[position + 1] if position + 1 < len(args) else ""
    if not following or following.startswith(("--", "@")):
        raise UserError(f"'{what}' names no file: write '{what} FILE.toml'")
    return following, position + 2


def _flag_at(args: list[str], position: int) -> tuple[Flag, int]:
    name, equals, attached = args[position][2:].partition("=")
    end = position + 1
    if equals:
        return Flag(name, (attached,)), end
    while end < len(args) and not args[end].startswith(("--", "@")):
        end += 1
    return Flag(name, tuple(args[position + 1 : end])), end


def section_layer(section: str, table: dict[str, Any]) -> dict[str, Any]:
    """Nest a file's table under the section it was given for."""
    keys = [key.replace("-", "_") for key in section.split(".")] if section else []
    for key in reversed(keys):
        table = {key: table}
    return table


def flag_layer(cls: type[BaseModel], flags: list[Flag], older: dict[str, Any]) -> dict[str, Any]:
    """Convert flags into a layer.

    Args:
        cls: The config class.
        flags: In order; a later flag wins over an earlier one.
        older: What the files say: it tells which variant of a section a flag means, unless the
            flags say so themselves.

    Raises:
        UserError: a flag has no value, several where one fits, or text that is not valid JSON
            where JSON is meant.
    """
    tags = {
        _tag_path(flag): flag.words[0]
        for flag in flags
        if flag.name.endswith(f".{schema.TAG}") and len(flag.words) == 1
    }
    layer: dict[str, Any] = {}
    for flag in flags:
        keys = _keys(flag)
        _put(layer, keys, _convert(flag, _allowed(cls, keys, older, tags)), flag)
    return layer


def _tag_path(flag: Flag) -> str:
    return flag.name.rpartition(".")[0].replace("-", "_")


def _is_negated(flag: Flag) -> bool:
    return flag.name.startswith(("no-", "no_"))


def _keys(flag: Flag) -> list[str]:
    """Return the names of the sections and the field; those of free tables are names too."""
    name = flag.name[3:] if _is_negated(flag) else flag.name
    keys = name.replace("-", "_").split(".")
    if not all(keys):
        raise UserError(f"--{flag.name}: a name is missing; write --section.field VALUE")
    return keys


def _allowed(
    cls: type[BaseModel], keys: list[str], older: Any, tags: dict[str, str]
) -> list[schema.Kind]:
    """Follow names through sections to what may stand there; empty where none declares it."""
    current = cls
    for position, key in enumerate(keys[:-1]):
        info = current.model_fields.get(key)
        if info is None:
            return []
        older = older.get(key) if isinstance(older, dict) else None
        following = keys[position + 1]
        classes = schema.variants(info.annotation)
        if following == schema.TAG and any(classes):
            return [schema.Kind(Literal[tuple(classes)])]
        path = ".".join(keys[: position + 1])
        tag = tags.get(path) or _older_tag(older) or schema.default_tag(info)
        chosen = _choose(classes, tag, following)
        if chosen is None:
            return []
        current = chosen
    field = current.model_fields.get(keys[-1])
    return [] if field is None else schema.field_kinds(field)


def _older_tag(older: Any) -> str | None:
    return older.get(schema.TAG) if isinstance(older, dict) else None


def _choose(
    classes: dict[str, type[BaseModel]], tag: str | None, key: str
) -> type[BaseModel] | None:
    """Return the variant with this tag; untagged, the first that has the key (for its type)."""
    if tag in classes:
        return classes[tag]
    having = [cls for cls in classes.values() if key in cls.model_fields]
    return having[0] if having else None


def _put(layer: dict[str, Any], keys: list[str], value: Any, flag: Flag) -> None:
    table = layer
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise UserError(
                f"--{flag.name}: another flag gives {key!r} a value as a whole; give one of them"
            )
    earlier = table.get(keys[-1])
    if isinstance(earlier, dict) and isinstance(value, dict):
        table[keys[-1]] = {**earlier, **value}
    else:
        table[keys[-1]] = value


def _convert(flag: Flag, allowed: list[schema.Kind]) -> Any:
    if any(get_origin(kind.type) is tuple for kind in allowed) and _is_list(flag, allowed):
        return _convert_list(flag, allowed)
    if any(kind.type is bool for kind in allowed) and not flag.words:
        return not _is_negated(flag)
    if _is_negated(flag):
        raise UserError(f"--{flag.name}: only a true-or-false field is negated, without a value")
    if len(flag.words) != 1:
        raise UserError(_wrong_number(flag, allowed))
    if not allowed:
        return _convert_free(flag)
    if any(schema.is_section(kind.type) or schema.is_table(kind.type) for kind in allowed):
        return _convert_table(flag)
    return _convert_text(flag.words[0], allowed)


def _wrong_number(flag: Flag, allowed: list[schema.Kind]) -> str:
    rule = f"it takes {schema.describe(allowed)}" if allowed else "a flag takes one value"
    if not flag.words:
        return f"--{flag.name}: no value given; {rule}"
    return (
        f"--{flag.name} {' '.join(flag.words)}: {len(flag.words)} values given; {rule}; "
        "put text with spaces in quotes"
    )


def _is_list(flag: Flag, allowed: list[schema.Kind]) -> bool:
    if len(flag.words) != 1 or flag.words[0].startswith("["):
        return True
    has_words = any(_choices(kind) for kind in allowed)
    is_none = flag.words[0] == "None" and any(kind.type is type(None) for kind in allowed)
    return not has_words and not is_none


def _choices(kind: schema.Kind) -> tuple[Any, ...]:
    return get_args(kind.type) if get_origin(kind.type) is Literal else ()


def _convert_list(flag: Flag, allowed: list[schema.Kind]) -> list[Any]:
    if len(flag.words) == 1 and flag.words[0].startswith("["):
        return _parse_json(flag)
    items = next(get_args(kind.type)[0] for kind in allowed if get_origin(kind.type) is tuple)
    return [_convert_text(word, list(schema.kinds(items))) for word in flag.words]


def _convert_table(flag: Flag) -> Any:
    return _parse_json(flag) if flag.words[0].startswith("{") else flag.words[0]


def _parse_json(flag: Flag) -> Any:
    try:
        return json.loads(flag.words[0], object_pairs_hook=_refuse_repeated_keys)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"--{flag.name} {flag.words[0]}: not valid JSON ({error}); a list is given as "
            "'[1, 2]' or as words, a table as '{\"key\": 1}'"
        ) from None


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {repeated!r} is given twice")
    return table


def _convert_text(text: str, allowed: list[schema.Kind]) -> Any:
    for kind in allowed:
        for choice in _choices(kind):
            if text == str(choice):
                return choice
    plain = [kind.type for kind in allowed]
    if text == "None" and type(None) in plain:
        return None
    if bool in plain and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if int in plain and INTEGER.fullmatch(text):
        return _integer(text)
    return _number_or_text(text) if float in plain else text


def _convert_free(flag: Flag) -> Any:
    """Convert a value of a free table as TOML would read it, text where it reads none."""
    text = flag.words[0]
    if text.startswith(("[", "{")):
        return _parse_json(flag)
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if INTEGER.fullmatch(text):
        return _integer(text)
    return _number_or_text(text)


def _integer(text: str) -> int | str:
    """Read an integer; text of more digits than Python reads stays text."""
    try:
        return int(text)
    except ValueError:
        return text


def _number_or_text(text: str) -> Any:
    return float(text) if NUMBER.fullmatch(text) else text
