"""Polynomial coefficients of Newton-Schulz: one row (a, b, c) a step, x -> a·x + b·x³ + c·x⁵.

Owns the named tables and the rule for step counts that a table does not have. Does not iterate:
read newton_schulz.py next.
"""

from collections.abc import Sequence
from itertools import chain, repeat
from numbers import Integral
from sys import float_info
from types import MappingProxyType
from typing import SupportsFloat

from trainer.errors import UserError

Row = tuple[float, float, float]
CoefficientTable = str | Sequence[Sequence[float]]

_QUINTIC: tuple[Row, ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

_KELLER_JORDAN: tuple[Row, ...] = ((3.4445, -4.7750, 2.0315),)

_POLAR_EXPRESS_SAFETY = 1.02

_POLAR_EXPRESS_SAFE: tuple[Row, ...] = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def _with_input_divided(row: Row, divisor: float) -> Row:
    """Return the row of x -> p(x / divisor)."""
    a, b, c = row
    return a / divisor, b / divisor**3, c / divisor**5


def _polar_express() -> tuple[Row, ...]:
    """Build Polar Express for an input of Frobenius norm 1.

    Its rows carry the safety factor in every step but the last, and expect an input of norm
    1 / 1.02; that division is folded into the first row, so that every table starts from norm 1.

    Source: Amsel et al., arXiv:2505.16932, with the constants of microsoft/dion 0a059a4,
    dion/polar_express.py (five steps, safety 2e-2, cushion 2). The folding is ours and exact.
    """
    first, *others = _POLAR_EXPRESS_SAFE
    return _with_input_divided(first, _POLAR_EXPRESS_SAFETY), *others


TABLES = MappingProxyType(
    {
        "quintic": _QUINTIC,
        "polar_express": _polar_express(),
        "keller_jordan": _KELLER_JORDAN,
    }
)


def resolve_coefficients(table: CoefficientTable, steps: int) -> tuple[Row, ...]:
    """Return one row per step; steps beyond the table repeat its last row.

    Args:
        table: a name in `TABLES`, or the rows themselves.
        steps: number of Newton-Schulz steps, at least 1.

    Raises:
        UserError: an unknown name, an empty list, a row that is not three finite numbers, or steps
            that are no whole number of at least 1.
    """
    if isinstance(steps, bool) or not isinstance(steps, Integral) or steps < 1:
        raise UserError(
            f"optim.ns_steps={steps!r}: must be a whole number of at least 1; the default is 5"
        )
    rows = _rows(table)
    return tuple(row for row, _ in zip(chain(rows, repeat(rows[-1])), range(steps), strict=False))


def _rows(table: CoefficientTable) -> tuple[Row, ...]:
    if isinstance(table, str):
        if table not in TABLES:
            raise UserError(
                f"optim.ns_coefficients={table!r}: not a known table; "
                f"give one of {', '.join(TABLES)} or a list of (a, b, c) rows"
            )
        return TABLES[table]
    try:
        rows = [tuple(row) for row in table]
    except TypeError as error:
        raise UserError(
            f"optim.ns_coefficients={table!r}: give one of {', '.join(TABLES)} or a list of "
            "(a, b, c) rows"
        ) from error
    if not rows:
        raise UserError("optim.ns_coefficients=[]: give at least one (a, b, c) row")
    return tuple(_row(row) for row in rows)


def _row(row: tuple[float, ...]) -> Row:
    if len(row) != 3:
        raise UserError(
            f"optim.ns_coefficients: row {list(row)} has {len(row)} numbers; a row is (a, b, c)"
        )
    if not all(map(_is_finite_number, row)):
        raise UserError(
            f"optim.ns_coefficients: row {list(row)} must be three finite numbers (a, b, c)"
        )
    a, b, c = (float(value) for value in row)
    return a, b, c


def _is_finite_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, SupportsFloat):
        return False
    # Not isfinite(), which an integer beyond floats makes raise.
    return bool(-float_info.max <= value <= float_info.max)  # pyright: ignore[reportOperatorIssue]
