"""What the config classes say about themselves: sections, variants, items, rules in words.

Owns the reading of pydantic field annotations; parses and validates nothing. Read `compose.py`
next, which walks sections with it.
"""

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

TAG = "type"
"""The key that says which variant of a section is meant."""


@dataclass(frozen=True)
class Kind:
    """One thing a field may hold: a plain type and its constraints."""

    type: Any
    constraints: tuple[Any, ...] = ()


def kinds(annotation: Any, constraints: tuple[Any, ...] = ()) -> Iterator[Kind]:
    """Yield what an annotation allows, unions flattened and `Annotated` unwrapped."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *metadata = get_args(annotation)
        yield from kinds(inner, (*constraints, *_flatten(metadata)))
    elif origin is Union or origin is types.UnionType:
        for member in get_args(annotation):
            yield from kinds(member, constraints)
    else:
        yield Kind(annotation, constraints)


def field_kinds(field: FieldInfo) -> list[Kind]:
    """Return what a field allows."""
    return list(kinds(field.annotation, tuple(field.metadata)))


def variants(annotation: Any) -> dict[str, type[BaseModel]]:
    """Return the section classes an annotation allows by tag; a section without tag has ''."""
    classes = [kind.type for kind in kinds(annotation) if is_section(kind.type)]
    return {tag_of(cls): cls for cls in classes}


def is_section(annotation: Any) -> bool:
    """Return whether an annotation is a config section class."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def tag_of(cls: type[BaseModel]) -> str:
    """Return the value of `type` that selects this class, '' if it has none."""
    return str(cls.model_fields[TAG].default) if TAG in cls.model_fields else ""


def default_tag(field: FieldInfo) -> str | None:
    """Return the tag of the variant a field has when nothing is given, None if it has none."""
    if isinstance(field.default, BaseModel):
        return tag_of(type(field.default))
    tags = list(variants(field.annotation))
    return tags[0] if len(tags) == 1 else None


def item_annotation(annotation: Any) -> Any:
    """Return the annotation of a list's items, None if the annotation allows no list."""
    for kind in kinds(annotation):
        if get_origin(kind.type) is tuple:
            return get_args(kind.type)[0]
    return None


def is_free_table(annotation: Any) -> bool:
    """Return whether a field takes any keys (a plain dict)."""
    return any(is_table(kind.type) for kind in kinds(annotation))


def is_table(annotation: Any) -> bool:
    """Return whether an annotation is a plain dict."""
    return annotation is dict or get_origin(annotation) is dict


def all_field_paths(cls: type[BaseModel], prefix: str = "") -> set[str]:
    """Return the dotted paths of all leaf fields of all variants."""
    paths: set[str] = set()
    for name, field in cls.model_fields.items():
        path = f"{prefix}{name}"
        sections = variants(field.annotation)
        if not sections:
            paths.add(path)
        for section in sections.values():
            paths |= all_field_paths(section, f"{path}.")
    return paths


def describe(allowed: list[Kind]) -> str:
    """Say in words what may stand there: 'an integer of at least 1 or None'."""
    sections = [kind for kind in allowed if is_section(kind.type)]
    words = [_describe_kind(kind) for kind in allowed if kind not in sections]
    if sections:
        tags = ", ".join(repr(tag_of(kind.type)) for kind in sections if tag_of(kind.type))
        words.insert(0, f"a section with type one of {tags}" if tags else "a section")
    return " or ".join(words)


def _describe_kind(kind: Kind) -> str:
    if kind.type is type(None):
        return "None"
    if get_origin(kind.type) is Literal:
        choices = get_args(kind.type)
        prefix = "one of " if len(choices) > 1 else ""
        return prefix + ", ".join(repr(choice) for choice in choices)
    if get_origin(kind.type) is tuple:
        return _describe_list(kind)
    names = {bool: "true or false", int: "an integer", float: "a finite number", str: "text"}
    return names.get(kind.type, "a table") + _describe_range(kind.constraints)


def _describe_list(kind: Kind) -> str:
    items = get_args(kind.type)
    item = describe(list(kinds(items[0])))
    if items[-1] is not Ellipsis:
        return f"a list of {len(items)} items, each {item}"
    non_empty = any(isinstance(constraint, MinLen) for constraint in kind.constraints)
    return f"a {'non-empty ' if non_empty else ''}list, each item {item}"


def _describe_range(constraints: tuple[Any, ...]) -> str:
    words = []
    for constraint in constraints:
        match constraint:
            case Ge(ge=low):
                words.append(f"at least {low}")
            case Gt(gt=low):
                words.append(f"above {low}")
            case Le(le=high):
                words.append(f"at most {high}")
            case Lt(lt=high):
                words.append(f"below {high}")
            case MinLen():
                return ", not empty"
            case _:
                pass
    return ", " + " and ".join(words) if words else ""


def _flatten(metadata: list[Any]) -> Iterator[Any]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from item.metadata
        else:
            yield item
