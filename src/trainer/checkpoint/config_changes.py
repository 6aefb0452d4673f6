"""What a run may change when it resumes, and what it may not.

Owns the comparison of two configs. A change is refused when the checkpoint would lose its meaning
under it: another network, another optimizer, another order of the data. Everything else takes
effect at once. Shapes are compared with the tensors themselves, in `match.py`.
"""

import re
from dataclasses import dataclass
from typing import Any

DATA_ORDER = (
    "the position in the data would point at something else; put it back, or start a new run"
)
FIXED = {
    "model.architecture": "the weights are of another network; put it back, or start a new run",
    "optim.type": "one optimizer's state means nothing to another; put it back, or start a new run",
    "data": DATA_ORDER,
    "env.source": DATA_ORDER,
    "env.shuffle": DATA_ORDER,
    "env.system": DATA_ORDER,
    "env.on_bad_row": DATA_ORDER,
    "val.fraction": "it decides which rows are trained on; put it back, or start a new run",
    "seed": "it decides the order of the data; put it back, or start a new run",
}
FREE_WITHIN_FIXED = {
    "data.micro_batch_size",
    "data.prefetch",
    "data.source.path",
    "env.source.path",
    "data.source.suffixes",
    "data.source.verify",
    "data.source.max_epochs",
}
"""Moved files are the same data while they are as many and as long, a renamed function while the
fingerprint of its rows is: the data position checks both. How often a source is to be gone through
decides nothing about what came before."""
FREE_FROM_ERROR = {
    "data.on_bad_row",
    "data.overlong",
    "data.source.on_bad_row",
    "env.on_bad_row",
}
"""Policies for what ended the run while they were "error": they have had nothing to apply to."""
_PLACE_IN_MIX = re.compile(r"\.sources\.\d+(?=\.)")
SAME_STATE = {"muon", "dion"}
"""Optimizer types that share one state layout, so that a run may go from one to the other."""


@dataclass(frozen=True)
class ConfigChange:
    """One field that differs.

    Attributes:
        field: Dotted name, as typed.
        saved: Its value in the checkpoint; None where absent.
        current: Its value in this run; None where absent.
    """

    field: str
    saved: Any
    current: Any

    def __str__(self) -> str:
        return f"{self.field}: {self.saved!r} -> {self.current!r}"


def compare_configs(
    saved: dict[str, Any], current: dict[str, Any]
) -> tuple[list[ConfigChange], list[ConfigChange]]:
    """Split what differs between two resolved configs into allowed and refused changes.

    Args:
        saved: The checkpoint's config, as `model_dump(mode="json")` gives it.
        current: This run's, likewise.

    Returns:
        Changes that take effect (to be logged), and changes that must be refused by name.
    """
    before, after = _flatten(saved), _flatten(current)
    allowed, refused = [], []
    for field in sorted(before.keys() | after.keys()):
        change = ConfigChange(field, before.get(field), after.get(field))
        if change.saved != change.current:
            (refused if refusal(change) else allowed).append(change)
    return allowed, refused


def refusal(change: ConfigChange) -> str | None:
    """Return why a change is refused, or None if it may happen."""
    field = _PLACE_IN_MIX.sub("", change.field)
    if field in FREE_WITHIN_FIXED or (field in FREE_FROM_ERROR and change.saved == "error"):
        return None
    if change.field == "optim.type" and {change.saved, change.current} <= SAME_STATE:
        return None
    for fixed, reason in FIXED.items():
        if change.field == fixed or change.field.startswith(fixed + "."):
            return reason
    return None


def refusal_message(refused: list[ConfigChange]) -> str:
    """Return one message for all refused changes."""
    lines = [f"{change} ({refusal(change)})" for change in refused]
    return "changed since the checkpoint, and may not: " + "; ".join(lines)


def _flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return leaves by dotted name; lists of values are leaves, absent and None are the same."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, list | tuple) and value and isinstance(value[0], dict):
            value = {str(index): entry for index, entry in enumerate(value)}
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        elif value is not None:
            flat[prefix + key] = list(value) if isinstance(value, tuple) else value
    return flat
