"""Composing layers (defaults, files, flags) into one table; later layers win.

Owns the rule for a section that changes its `type`: it is replaced, and what the older layers
said about it survives only where the new type has the same key; the rest is dropped and named
in the notes. So is a field that gives way to another that says the same in another way. Validation
comes after (`load.py`), so that each layer's own keys stay strict.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trainer.config import schema
from trainer.config.base import Section
from trainer.errors import UserError

DEFAULTS = "defaults"
COMMAND_LINE = "on the command line"


@dataclass(frozen=True)
class _Newer:
    """A table of the layer that is merged.

    Attributes:
        values: What it says.
        path: Where it stands in the whole table, as the user types it; empty for the whole.
        origin: Which layer it is, for messages.
    """

    values: dict[str, Any]
    path: str
    origin: str

    def path_of(self, key: str) -> str:
        """Return where a key of this table stands in the whole."""
        return f"{self.path}.{key}" if self.path else key

    def table(self, key: str) -> "_Newer":
        """Return the table under a key."""
        return _Newer(self.values[key], self.path_of(key), self.origin)


@dataclass
class Composition:
    """The table composed so far, with the origin of every value and notes for the log."""

    cls: type[BaseModel]
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, layer: dict[str, Any], origin: str) -> None:
        """Merge a layer over what is there.

        Raises:
            UserError: a section changes its type over an older layer that has an unknown key.
        """
        self._merge(self.cls, self.values, _Newer(copy.deepcopy(layer), "", origin))

    def _merge(self, cls: type[BaseModel], older: dict[str, Any], newer: _Newer) -> None:
        self._drop_alternatives(cls, older, newer)
        for key, value in newer.values.items():
            info = cls.model_fields.get(key)
            if info is None or not isinstance(value, dict):
                self._set(older, newer, key)
            elif schema.variants(info.annotation):
                older[key] = self._merge_section(info, older.get(key), newer.table(key))
            elif (
                value and schema.is_free_table(info.annotation) and isinstance(older.get(key), dict)
            ):
                # An empty table adds nothing: it stands for none, and empties the older one.
                for name in value:
                    self._set(older[key], newer.table(key), name)
            else:
                self._set(older, newer, key)

    def _drop_alternatives(
        self, cls: type[BaseModel], older: dict[str, Any], newer: _Newer
    ) -> None:
        """Let what an older layer said give way where the newer one says it in another way."""
        pairs = cls.ALTERNATIVES if issubclass(cls, Section) else ()
        for name, other in [*pairs, *(pair[::-1] for pair in pairs)]:
            if (
                _is_given(newer.values, name)
                and other not in newer.values
                and _is_given(older, other)
            ):
                other_path = newer.path_of(other)
                self.notes.append(
                    f"{newer.path_of(name)}={newer.values[name]!r} ({newer.origin}) takes the "
                    f"place of {other_path}={older.pop(other)!r} ({self.origins[other_path]})"
                )
                self._forget(other_path)

    def _merge_section(self, info: FieldInfo, older: Any, newer: _Newer) -> dict[str, Any]:
        classes = schema.variants(info.annotation)
        section: dict[str, Any] = older if isinstance(older, dict) else {}
        if not section:
            self._forget(newer.path)
        old_tag = str(section.get(schema.TAG, schema.default_tag(info)))
        new_tag = str(newer.values.get(schema.TAG, old_tag))
        if new_tag not in classes:
            return {**section, **newer.values}
        if section and new_tag != old_tag and old_tag in classes:
            section = self._retype(section, classes[old_tag], classes[new_tag], newer)
        if new_tag:
            section.setdefault(schema.TAG, new_tag)
        self._merge(classes[new_tag], section, newer)
        return section

    def _retype(
        self,
        section: dict[str, Any],
        old: type[BaseModel],
        new: type[BaseModel],
        newer: _Newer,
    ) -> dict[str, Any]:
        kept, dropped = {}, []
        for key, value in section.items():
            key_path = newer.path_of(key)
            if key == schema.TAG or self.origins.get(key_path) == DEFAULTS:
                self._forget(key_path)
            elif key not in old.model_fields:
                known = ", ".join(old.model_fields)
                raise UserError(
                    f"{key_path}={value!r}: unknown key of {schema.TAG} '{schema.tag_of(old)}' "
                    f"({self.origins.get(key_path, 'in an earlier layer')}); known are {known}"
                )
            elif key in new.model_fields:
                kept[key] = value
            else:
                dropped.append(f"{key_path}={value!r}")
                self._forget(key_path)
        if dropped:
            self.notes.append(
                f"{newer.path}.type changes from '{schema.tag_of(old)}' to '{schema.tag_of(new)}' "
                f"({newer.origin}): dropped {', '.join(dropped)}, "
                f"which '{schema.tag_of(new)}' lacks"
            )
        return kept

    def _set(self, table: dict[str, Any], newer: _Newer, key: str) -> None:
        path = newer.path_of(key)
        self._forget(path)
        table[key] = newer.values[key]
        self.origins[path] = newer.origin

    def _forget(self, path: str) -> None:
        for known in [p for p in self.origins if p == path or p.startswith(f"{path}.")]:
            del self.origins[known]


def _is_given(table: dict[str, Any], key: str) -> bool:
    return table.get(key, "None") not in (None, "None")


def default_layer(cls: type[BaseModel]) -> dict[str, Any]:
    """Return what the defaults of section fields say beyond the section classes' own defaults.

    A field `optim: MuonConfig = MuonConfig(lr=1e-3)` must keep its lr when a file sets only mu.
    """
    layer: dict[str, Any] = {}
    for name, info in cls.model_fields.items():
        if isinstance(info.default, BaseModel):
            given = info.default.model_dump(exclude_unset=True)
            nested = default_layer(type(info.default))
            section = {**nested, **given}
            tag = schema.tag_of(type(info.default))
            if section:
                layer[name] = {schema.TAG: tag, **section} if tag else section
    return layer
