"""The routing table as text: one line a parameter, or one a kind of parameter (`grouped`)."""

import re
from collections.abc import Sequence

from trainer.optim.plan import Plan, Route

_HEADER = ("parameter", "shape", "algorithm", "lr scale", "layout", "kernel")


def routing_table(plan: Plan, *, grouped: bool = False) -> str:
    """Return the routing table.

    Args:
        plan: The plan to print.
        grouped: Print parameters that differ only in a layer's number as one line, with a count.
    """
    rows = _grouped_rows(plan.routes) if grouped else [_row(r, r.parameter) for r in plan.routes]
    lines = [_HEADER, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEADER) - 1)]
    return "\n".join(
        "  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[-1]]).rstrip()
        for line in lines
    )


def _grouped_rows(routes: Sequence[Route]) -> list[tuple[str, ...]]:
    counts: dict[tuple[str, ...], int] = {}
    for route in routes:
        row = _row(route, re.sub(r"\.\d+\.", ".*.", route.parameter))
        counts[row] = counts.get(row, 0) + 1
    return [
        (f"{row[0]} ({count})" if count > 1 else row[0], *row[1:]) for row, count in counts.items()
    ]


def _row(route: Route, name: str) -> tuple[str, ...]:
    shape = "x".join(str(size) for size in route.shape)
    kernel = f"{route.kernel} ({route.kernel_reason})" if route.kernel_reason else route.kernel
    return (
        name,
        shape,
        f"{route.algorithm}:{route.group}",
        f"{route.lr_scale:.4g}",
        route.layout,
        kernel,
    )
