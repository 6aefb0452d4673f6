"""What every config section shares: strict keys, strict numbers, frozen values.

A section never converts: `"1e-4"` is not a number, 1.5 is not a count, nan and inf are refused.
Flags arrive as text and are converted by `trainer.config.load` before they reach a section.
"""

import os
import re
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, ConfigDict, Field, model_validator
from pydantic_config import BaseConfig

Int = Annotated[int, Field(strict=True)]
Bool = Annotated[bool, Field(strict=True)]
Float = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=1)]
CountOrZero = Annotated[int, Field(strict=True, ge=0)]
PositiveFloat = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0)]
NonNegativeFloat = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0)]
Fraction = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=1)]
OpenFraction = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, lt=1)]
Text = Annotated[str, Field(strict=True, min_length=1)]
"""Of names and paths: an empty one would mean the working directory."""
_LONGEST_NAME, _LONGEST_PATH = 255, 4095
"""Bytes that Linux and its file systems take."""


def path_in_full(path: str) -> str:
    """Return a path with the home folder for `~`, as a shell would give it.

    In a file, in quotes and behind `=` no shell has; a folder named `~` is in nobody's mind.

    Raises:
        ValueError: there is no such user, or no file can have that name.
    """
    full = os.path.expanduser(path)
    if full.startswith("~"):
        raise ValueError(
            f"{path!r} begins with the home of a user whom this machine does not know: write it in "
            f"full, or './{path}' for a folder of that name"
        )
    longest = max(len(os.fsencode(name)) for name in full.split("/"))
    if longest > _LONGEST_NAME or len(os.fsencode(full)) > _LONGEST_PATH:
        raise ValueError(
            f"{path[:40]!r}… is too long for a path: a name takes {_LONGEST_NAME} bytes, all of it "
            f"{_LONGEST_PATH}; shorten it"
        )
    return full


PathText = Annotated[Text, AfterValidator(path_in_full)]
"""Where a file or folder is or shall be; a name on the hub may stand there too."""
Seed = Annotated[int, Field(strict=True, ge=0, le=2**32 - 1)]
"""What every random generator takes; numpy's takes no more."""


def _holds_no_none(table: dict[str, Any]) -> dict[str, Any]:
    _refuse_none(table, "")
    return table


def _refuse_none(value: Any, name: str) -> None:
    if value is None:
        raise ValueError(f"{name}=None: a table of free keys holds no None; leave it out")
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _refuse_none(item, f"{name}.{key}".lstrip("."))


FreeTable = Annotated[dict[str, Any], AfterValidator(_holds_no_none)]
"""Any keys. TOML has no None, and writes it as the text that it would be here."""
_FUNCTION_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def _names_a_function(path: str) -> str:
    if not _FUNCTION_PATH.fullmatch(path):
        raise ValueError(f"{path!r} names no function: write it as 'module:function'")
    return path


FunctionPath = Annotated[str, AfterValidator(_names_a_function)]
"""`module:function`; the module is imported with the working directory on the path."""


class Section(BaseConfig):
    """A frozen config section that refuses unknown keys.

    Attributes:
        ALTERNATIVES: Pairs of fields that say the same in two ways. In one layer only one of them
            may be given; that of a later layer takes the place of the other's (`compose.py`).
    """

    ALTERNATIVES: ClassVar[tuple[tuple[str, str], ...]] = ()

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _coerce_dict_str_values(cls, data: Any) -> Any:
        """Replace the library's validator of this name, which turns text in tables into numbers.

        It cannot tell a flag from a file that says `"1"`; `trainer.config.arguments` can.
        """
        return data
