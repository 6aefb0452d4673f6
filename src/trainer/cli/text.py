"""What `--help` and `--version` print; the fields come from the config classes."""

import importlib.metadata
import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from trainer.config import schema

COMMANDS_HINT = "commands are sft, rl, pretrain, plan, tokenize, export; see 'trainer --help'"

USAGE = """\
usage: trainer COMMAND …

  sft       @ FILE.toml [--section.field VALUE …]   supervised fine-tuning
  rl        @ FILE.toml [--section.field VALUE …]   reinforcement learning
  pretrain  @ FILE.toml [--section.field VALUE …]   pretraining
  plan      sft|rl|pretrain @ FILE.toml [--world-size N] [--gpu NAME]
                                                    memory and optimizer plan; no ranks, no GPU
  tokenize  SRC DST [--tokenizer NAME]              token shards from text, for pretraining
  export    CHECKPOINT OUT [--dtype NAME]           Hugging Face weights from a checkpoint

Several '@ FILE' compose: later files win over earlier ones, flags over files.
'--section @ FILE' fills one section. '--dry-run' prints the resolved config and stops.
'trainer COMMAND --help' lists every field.

On several GPUs: torchrun --nproc-per-node 8 -m trainer sft @ FILE.toml
Exit status: 0 done, 1 failure, 2 error in what was asked, 143 / 130 after SIGTERM / SIGINT."""

WIDTH = 100


def version() -> str:
    """Return the name and version."""
    return f"trainer {importlib.metadata.version('trainer')}"


def command_help(command: str, cls: type[BaseModel]) -> str:
    """Return the help of a training command: every field, its rule, default and meaning."""
    lines = [
        f"usage: trainer {command} @ FILE.toml [--section.field VALUE …] [--dry-run]",
        "",
        *_section_lines(cls, "", cls.__doc__),
    ]
    return "\n".join(lines)


def _section_lines(cls: type[BaseModel], path: str, title: str | None) -> Iterator[str]:
    """Yield a section's own fields, then those of its sections, every variant with its tag."""
    if title:
        heading = f"[{path}] " if path else ""
        yield heading + " ".join(title.split("\n\n")[0].split())
    sections: list[tuple[str, FieldInfo]] = []
    for name, field in cls.model_fields.items():
        field_path = f"{path}.{name}".lstrip(".")
        if schema.variants(field.annotation):
            sections.append((field_path, field))
        elif name != schema.TAG:
            yield from _field_lines(field_path, field)
    for field_path, field in sections:
        for tag, variant in schema.variants(field.annotation).items():
            yield ""
            suffix = f" type = {tag!r}{' (default)' if tag == _given_tag(field) else ''}:"
            title = f"{suffix if tag else ''} {variant.__doc__ or ''}"
            yield from _section_lines(variant, field_path, title)


def _given_tag(field: FieldInfo) -> str | None:
    default = field.default
    return schema.tag_of(type(default)) if isinstance(default, BaseModel) else None


def _field_lines(path: str, field: FieldInfo) -> Iterator[str]:
    rule = schema.describe(schema.field_kinds(field))
    flag = "--" + path.replace("_", "-")
    about = " ".join((field.description or "").split())
    yield f"  {flag}: {rule}; {_default_words(field)}"
    if about:
        yield textwrap.fill(about, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _default_words(field: FieldInfo) -> str:
    default: Any = field.default
    if default is PydanticUndefined:
        return "required"
    return f"default {list(default) if isinstance(default, tuple) else default!r}"
