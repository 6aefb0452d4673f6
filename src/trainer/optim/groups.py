"""Which parameter is updated how: dense matrices, experts and routers by Muon, the rest by AdamW.

Owns the rules by name and shape, and the reading of torch's forms of param groups. The groups'
hyperparameters are `setup.py`'s.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from trainer.errors import UserError

GroupName = Literal["dense", "experts", "router", "adamw"]
GROUP_NAMES: tuple[GroupName, ...] = ("dense", "experts", "router", "adamw")
"""The groups in order; all but the last are Muon's."""

_ROUTER = re.compile(r"(^|\.)((mlp|moe|block_sparse_moe)\.gate|router(\.gate)?)\.weight$")
_EXPERTS = re.compile(r"(^|\.)experts\.")
_NO_MATRIX = re.compile(
    r"(^|[._])(emb|embed|embeddings?|wte|wpe|lm_head|norm|ln|bias)([._\d]|$)"
    # The head as torchtitan and timm name it, which inside a layer is a projection.
    r"|^((_orig_mod|module|model)\.)*(output|head)\.weight$"
)
_CONVOLUTION = re.compile(r"(^|[._])conv(1d)?([._\d]|$)")


@dataclass(frozen=True)
class NamedGroup:
    """A param group with the names of its parameters kept beside it.

    Attributes:
        name: For tables and metrics.
        named_parameters: In order.
        settings: Hyperparameters that the group sets for itself.
    """

    name: str
    named_parameters: tuple[tuple[str, Tensor], ...]
    settings: dict[str, Any] = field(default_factory=dict)

    def as_param_group(self) -> dict[str, Any]:
        """Return the group in torch's form, without names."""
        return {"params": [parameter for _, parameter in self.named_parameters], **self.settings}


def list_pairs(named_parameters: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Return (name, parameter) pairs as a list.

    Raises:
        TypeError: something else was given, such as `model.parameters()` or a dict.
    """
    pairs = list(named_parameters)
    for pair in pairs:
        match pair:
            case (str(), Tensor()):
                continue
        raise TypeError(
            f"named_parameters holds a {type(pair).__name__}, not (name, parameter) pairs: give "
            "model.named_parameters(), or .items() of a dict"
        )
    return pairs


def sort_parameters(named_parameters: Iterable[tuple[str, Tensor]]) -> list[NamedGroup]:
    """Sort a model's parameters into groups; empty groups are left out.

    A frozen parameter is in no group. A parameter under several names counts once, under its
    first name: tied embeddings are embeddings.

    Raises:
        UserError: nothing is trainable.
    """
    members: dict[GroupName, dict[Tensor, str]] = {name: {} for name in GROUP_NAMES}
    seen: set[Tensor] = set()
    for name, parameter in named_parameters:
        if parameter.requires_grad and parameter not in seen:
            seen.add(parameter)
            members[group_of(name, tuple(parameter.shape))][parameter] = name
    groups = [
        NamedGroup(group, tuple((name, parameter) for parameter, name in found.items()))
        for group, found in members.items()
        if found
    ]
    if not groups:
        raise UserError("no parameter requires a gradient: unfreeze some before training")
    return groups


def group_of(name: str, shape: Sequence[int]) -> GroupName:
    """Return the group of a parameter from its name and global shape.

    AdamW takes embeddings, output heads, norms, biases, whatever has fewer than two dims, and
    kernels of depthwise and 1-D convolutions, which are no matrices.
    """
    if len(shape) < 2 or _NO_MATRIX.search(name) or _is_small_kernel(name, shape):
        return "adamw"
    if _ROUTER.search(name):
        return "router"
    if _EXPERTS.search(name):
        return "experts"
    return "dense"


def _is_small_kernel(name: str, shape: Sequence[int]) -> bool:
    is_depthwise = len(shape) >= 3 and shape[1] == 1
    return is_depthwise or (len(shape) == 3 and bool(_CONVOLUTION.search(name)))


def check_cover(
    groups: Sequence[NamedGroup], named_parameters: Iterable[tuple[str, Tensor]]
) -> None:
    """Check that every trainable parameter is in one group, and no frozen one in any.

    Raises:
        UserError: naming the parameter and its groups.
    """
    where: dict[Tensor, list[str]] = {}
    for group in groups:
        for _, parameter in group.named_parameters:
            where.setdefault(parameter, []).append(group.name)
    for name, parameter in named_parameters:
        found = where.get(parameter, [])
        if len(found) != parameter.requires_grad:
            kind = "trainable" if parameter.requires_grad else "frozen"
            raise UserError(
                f"{kind} parameter {name} is in {len(found)} param groups ({', '.join(found)}): a "
                "trainable parameter belongs in exactly one, a frozen one in none"
            )


def parse_groups(params: Iterable[Any]) -> list[NamedGroup]:
    """Read torch's forms of `params`: tensors, (name, tensor) pairs, or groups of either.

    Raises:
        UserError: there is no parameter, one appears twice, or their order is not given.
    """
    members = _ordered(params, "params")
    groups: list[dict[str, Any]]
    groups = members if any(isinstance(m, dict) for m in members) else [{"params": members}]
    parsed, count = [], 0
    for index, group in enumerate(groups):
        if not isinstance(group, dict):
            raise UserError(
                f"params mixes groups with a {type(group).__name__}: give param groups alone"
            )
        settings = {key: value for key, value in group.items() if key not in ("params", "name")}
        name = group.get("name", f"group{index}")
        if "params" not in group:
            raise UserError(f"param group {name} has no 'params': give it a list of parameters")
        listed = group["params"]
        listed = [listed] if isinstance(listed, Tensor) else _ordered(listed, f"group {name}")
        named = []
        for member in listed:
            named.append(member if isinstance(member, tuple) else (f"parameter{count}", member))
            count += 1
        parsed.append(NamedGroup(name, tuple(named), settings))
    _check_members(parsed)
    return parsed


def _ordered(members: Any, what: str) -> list[Any]:
    """Return what was given as a list, if its order is the same on all ranks."""
    if isinstance(members, set | frozenset):
        raise UserError(f"{what} is a set, whose order differs from rank to rank: give a list")
    if isinstance(members, Tensor) or not isinstance(members, Iterable):
        raise UserError(
            f"{what} is a {type(members).__name__}: give parameters, (name, parameter) pairs such "
            "as model.named_parameters(), or param groups"
        )
    return list(members)


def _check_members(groups: Sequence[NamedGroup]) -> None:
    names: dict[Tensor, str] = {}
    for group in groups:
        for name, parameter in group.named_parameters:
            if not isinstance(parameter, Tensor):
                raise UserError(
                    f"param group {group.name} has a {type(parameter).__name__} where a parameter "
                    "belongs: give parameters or (name, parameter) pairs"
                )
            if parameter in names:
                raise UserError(
                    f"parameter {name} of param group {group.name} is {names[parameter]} once "
                    "more: give each parameter once"
                )
            names[parameter] = name
    if not names:
        raise UserError("the optimizer got no parameters: pass model.named_parameters()")
