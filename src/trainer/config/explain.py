"""Turning what pydantic refuses into messages: field as typed, value, rule, remedy.

Owns the wording of every config error that validation finds. Pydantic's location of an error
also holds variant tags and union members; `locate` leaves only what a user typed.
"""

import difflib
import math
import re
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from trainer.config import schema
from trainer.config.compose import COMMAND_LINE

MAX_MESSAGES = 20


@dataclass(frozen=True)
class Place:
    """Where an error lies: its dotted path, the section around it and the field, if declared."""

    path: str
    section: type[BaseModel]
    section_path: str
    field: FieldInfo | None


def explain(
    error: ValidationError, cls: type[BaseModel], values: dict[str, Any], origins: dict[str, str]
) -> str:
    """Return one line per refused field.

    Args:
        error: What `cls.model_validate(values)` raised.
        cls: The config class.
        values: The composed table that was refused.
        origins: For each path, the file or flag it came from.
    """
    details = error.errors(include_url=False)
    placed = [(locate(cls, detail["loc"]), detail) for detail in details]
    messages: dict[str, str] = {}
    for place, detail in placed:
        nested = any(
            other.path.startswith((f"{place.path}.", f"{place.path}[")) for other, _ in placed
        )
        if place.path not in messages and not (nested and detail["type"] == "too_short"):
            messages[place.path] = _message(place, detail, cls, values, origins)
    lines = list(messages.values())
    if len(lines) > MAX_MESSAGES:
        lines[MAX_MESSAGES:] = [f"and {len(lines) - MAX_MESSAGES} more"]
    return "\n".join(lines)


def locate(cls: type[BaseModel], loc: tuple[str | int, ...]) -> Place:
    """Follow a pydantic error location through the sections of `cls`."""
    path, section, section_path = "", cls, ""
    classes: dict[str, type[BaseModel]] = {"": cls}
    annotation: Any = cls
    field: FieldInfo | None = None
    for position, item in enumerate(loc):
        if isinstance(item, int):
            path, annotation = f"{path}[{item}]", schema.item_annotation(annotation)
            classes = schema.variants(annotation) if annotation is not None else {}
        elif len(classes) > 1:
            section, section_path = classes[item], path
            classes = {"": section}
        elif classes:
            section, section_path = next(iter(classes.values())), path
            path = f"{path}.{item}".lstrip(".")
            field = section.model_fields.get(item)
            if field is None or _is_union_of_values(field):
                break
            annotation = field.annotation
            classes = schema.variants(annotation)
        elif position and schema.is_free_table(annotation):
            path = f"{path}.{item}"
    if classes and path and field is not None and len(classes) == 1:
        section, section_path = next(iter(classes.values())), path
    return Place(path, section, section_path, field)


def _is_union_of_values(field: FieldInfo) -> bool:
    allowed = [kind for kind in schema.field_kinds(field) if kind.type is not type(None)]
    return len(allowed) > 1 and not any(schema.is_section(kind.type) for kind in allowed)


def _message(
    place: Place,
    detail: ErrorDetails,
    cls: type[BaseModel],
    values: dict[str, Any],
    origins: dict[str, str],
) -> str:
    path, value = place.path, detail["input"]
    where = _origin_of(path, origins)
    match detail["type"]:
        case "value_error":
            return _validator_message(place, detail)
        case "missing" if place.field is not None and not path.endswith("]"):
            return _missing_message(path, place.field)
        case "extra_forbidden" if "." in str(detail["loc"][-1]):
            key = str(detail["loc"][-1])
            name = key.rpartition(".")[2]
            return (
                f"{key!r}={value!r}: in quotes the dot is part of the name{where}; write {key} "
                f"without quotes, or {name} in its section"
            )
        case "extra_forbidden":
            return _unknown_message(path, value, place.section, cls, where)
        case "union_tag_not_found":
            tags = ", ".join(map(repr, schema.variants(_annotation_at(place))))
            return f"{path}.type: not given{where}; choose one of {tags}"
        case "union_tag_invalid":
            return _tag_message(path, value, place, where)
        case "string_pattern_mismatch":
            pattern = detail["ctx"]["pattern"] if "ctx" in detail else ""
            return f"{path}={value!r}: must match {pattern}; correct it{where}"
        case "model_type" | "model_attributes_type":
            example = f"{path}.{_first_key(place)}"
            return f"{path}={value!r}: is a section{where}; set its fields, such as {example}"
        case _:
            return _rule_message(place, detail, values, where)


def _validator_message(place: Place, detail: ErrorDetails) -> str:
    text = detail["msg"].removeprefix("Value error, ")
    if not place.path:
        return text
    starts_with_field = any(text.startswith(f"{name}=") for name in place.section.model_fields)
    return f"{place.path}.{text}" if starts_with_field else f"{place.path}: {text}"


def _missing_message(path: str, field: FieldInfo) -> str:
    if schema.variants(field.annotation):
        return f"{path}: required and not given; add a [{path}] section to a file"
    rule = schema.describe(schema.field_kinds(field))
    return f"{path}: required and not given; give {rule}, in a file or as {flag_name(path)} VALUE"


def _unknown_message(
    path: str, value: Any, section: type[BaseModel], cls: type[BaseModel], where: str
) -> str:
    parent, _, name = path.rpartition(".")
    known = list(section.model_fields)
    shown = f"{path}={value!r}" if not isinstance(value, dict) else path
    others = _variants_with(cls, path)
    if others:
        return (
            f"{shown}: unknown key of type {schema.tag_of(section)!r}{where}; it belongs to "
            f"{', '.join(map(repr, others))}: remove it or change {parent}.type"
        )
    similar = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    candidates = [f"{parent}.{match}".lstrip(".") for match in similar] or sorted(
        known_path
        for known_path in schema.all_field_paths(cls)
        if known_path.rpartition(".")[2] == name.replace("-", "_")
    )
    if candidates:
        return f"{shown}: unknown key{where}; did you mean {' or '.join(candidates[:3])}?"
    return f"{shown}: unknown key{where}; known here are {', '.join(known)}"


def _variants_with(cls: type[BaseModel], path: str) -> list[str]:
    """Return the tags of the variants of the section around `path` that know its last key."""
    *parents, name = path.split(".")
    sections = [cls]
    for key in parents:
        fields = [section.model_fields.get(key) for section in sections]
        sections = [
            variant
            for field in fields
            if field is not None
            for variant in schema.variants(field.annotation).values()
        ]
    return [schema.tag_of(section) for section in sections if name in section.model_fields]


def _tag_message(path: str, value: Any, place: Place, where: str) -> str:
    tag = value[schema.TAG]
    tags = list(schema.variants(_annotation_at(place)))
    similar = difflib.get_close_matches(str(tag), tags, n=1)
    hint = f"; did you mean {similar[0]!r}?" if similar else f"; correct it{where}"
    return f"{path}.type={tag!r}: must be one of {', '.join(map(repr, tags))}{hint}"


def _first_key(place: Place) -> str:
    classes = list(schema.variants(_annotation_at(place)).values())
    return schema.TAG if len(classes) > 1 else next(iter(classes[0].model_fields))


def _annotation_at(place: Place) -> Any:
    assert place.field is not None
    annotation = place.field.annotation
    return schema.item_annotation(annotation) if place.path.endswith("]") else annotation


def _rule_message(place: Place, detail: ErrorDetails, values: dict[str, Any], where: str) -> str:
    value = _value_at(values, place.path, detail["input"])
    if place.field is None:
        return f"{place.path}={value!r}: {detail['msg']}{where}"
    allowed = schema.field_kinds(place.field)
    if place.path.endswith("]"):
        allowed = list(schema.kinds(schema.item_annotation(place.field.annotation)))
    rule = schema.describe(allowed)
    return f"{place.path}={value!r}: must be {rule}; {_remedy(value, rule, where)}{where}"


def _remedy(value: Any, rule: str, where: str) -> str:
    if isinstance(value, str):
        if _is_number(value) and COMMAND_LINE not in where:
            return "write it without quotes"
        choices = re.findall(r"'([^']*)'", rule)
        similar = difflib.get_close_matches(value, choices, n=1)
        return f"did you mean {similar[0]!r}?" if similar else "correct it"
    if rule.startswith("text"):
        return "put it in quotes"
    return "correct it"


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _value_at(values: dict[str, Any], path: str, fallback: Any) -> Any:
    table: Any = values
    for key in path.split("."):
        if not isinstance(table, dict) or key not in table:
            return fallback
        table = table[key]
    return table


def _origin_of(path: str, origins: dict[str, str]) -> str:
    while path:
        if path in origins:
            return f" ({origins[path]})"
        path = path.rpartition(".")[0] if "[" not in path else path.rpartition("[")[0]
    return ""


def flag_name(path: str) -> str:
    """Return the flag that sets a field: `data.seq_len` is set by `--data.seq-len`."""
    return "--" + path.replace("_", "-")
