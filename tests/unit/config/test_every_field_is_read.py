"""No field is there for nothing: each is read somewhere outside the config, under its own name."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from trainer.cli.commands import config_class
from trainer.config import schema
from trainer.config.model import MoEArchitecture

SOURCE = Path(__file__).parents[3] / "src" / "trainer"
# It holds `phases`, which the loops' schedule is made of.
PHASES = SOURCE / "config" / "scheduler.py"
# These reach transformers as a whole; tests/unit/model/test_architecture.py sees them arrive.
AS_A_WHOLE = set(MoEArchitecture.model_fields)


def names_read() -> set[str]:
    """Return attributes and keywords of patterns in all code but the config's, and in `phases`."""
    names: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        if path.is_relative_to(SOURCE / "config") and path != PHASES:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Attribute(attr=name):
                    names.add(name)
                case ast.MatchClass(kwd_attrs=keywords):
                    names.update(keywords)
                case _:
                    pass
    return names


def is_fixed(annotation: Any) -> bool:
    """Return whether one value alone may stand there, which then decides nothing."""
    return get_origin(annotation) is Literal and len(get_args(annotation)) == 1


def fields(cls: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield path and name of every field that holds a value, in all variants."""
    for name, field in cls.model_fields.items():
        item = schema.item_annotation(field.annotation)
        sections = schema.variants(field.annotation) | schema.variants(item)
        if not sections and not is_fixed(field.annotation):
            yield prefix + name, name
        for section in sections.values():
            yield from fields(section, f"{prefix}{name}.")


@pytest.mark.parametrize("command", ["sft", "rl", "pretrain"])
def test_every_field_is_read(command: str) -> None:
    known = names_read() | AS_A_WHOLE | {schema.TAG}
    unread = {path for path, name in fields(config_class(command)) if name not in known}
    assert not unread
