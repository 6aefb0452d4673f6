"""What every config section shares: strict keys, strict numbers, frozen values.

A section never converts: `"1e-4"` is not a number, 1.5 is not a count, nan and inf are refused.
Flags arrive as text and are converted by `trainer.config.load` before they reach a section.
"""

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
