"""Writing a config as TOML that `load.py` reads back equal.

None, which TOML lacks, is written as the text "None" (the library's convention).
"""

import json
import re
from typing import Any

from pydantic import BaseModel

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def dump_config(config: BaseModel) -> str:
    """Return every field of a config, defaults included, as TOML."""
    return "\n".join(_table_lines(config.model_dump(), "")).strip() + "\n"


def _table_lines(table: dict[str, Any], path: str) -> list[str]:
    values = {key: value for key, value in table.items() if not isinstance(value, dict)}
    tables = {key: value for key, value in table.items() if isinstance(value, dict)}
    lines = ["", f"[{path}]"] if path and (values or not tables) else []
    lines += [f"{_key(key)} = {_value(value)}" for key, value in values.items()]
    for key, value in tables.items():
        lines += _table_lines(value, f"{path}.{_key(key)}" if path else _key(key))
    return lines


def _key(key: str) -> str:
    return key if BARE_KEY.fullmatch(key) else _text(key)


def _text(text: str) -> str:
    # JSON escapes all that TOML wants escaped but DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    match value:
        case None:
            return '"None"'
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return repr(value)
        case str():
            return _text(value)
        case list() | tuple():
            return "[" + ", ".join(_value(item) for item in value) + "]"
        case dict():
            items = ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items())
            return "{ " + items + " }" if items else "{}"
        case _:
            raise TypeError(f"{value!r} has no TOML form")
