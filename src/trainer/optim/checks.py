"""What Muon refuses: hyperparameters, members, gradients and flags that it cannot honour.

Owns the checks and their messages, none of which moves a tensor. Options that never enter a group
are `options.py`'s.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from trainer.errors import UserError
from trainer.optim.bucket import BYTES
from trainer.optim.bucketing import lr_scale
from trainer.optim.groups import NamedGroup
from trainer.optim.layout import local_shape
from trainer.optim.plan import PlannedGroup
from trainer.optim.spec import ParameterSpec
from trainer.optim.state import local, placement_text, view_as_matrices

_LIMITS = {
    "lr": math.inf,
    "mu": 1,
    "momentum": 1,
    "beta1": 1,
    "beta2": 1,
    "weight_decay": math.inf,
    "epsilon": math.inf,
}
"""Hyperparameters that are numbers of at least 0, and what each must stay below."""

_NUMBERS = ("lr", "mu", "beta1", "beta2", "weight_decay", "epsilon")
_SWITCHES = ("nesterov", "cautious_wd", "flatten")
_OTHERS = ("algorithm", "adjust_lr", "step")
_KNOWN = {*_NUMBERS, *_SWITCHES, *_OTHERS}


def check_group(group: dict[str, Any], named: NamedGroup) -> None:
    """Check a param group's hyperparameters and that Muon's members are matrices.

    Raises:
        UserError: naming the hyperparameter or the parameter.
    """
    check_keys(named, _KNOWN)
    check_step_numbers(group)
    for key in _SWITCHES:
        if not isinstance(group[key], bool):
            raise UserError(f"{key}={group[key]!r}: must be True or False")
    if group["algorithm"] not in ("muon", "adamw"):
        raise UserError(f"algorithm={group['algorithm']!r}: choose 'muon' or 'adamw'")
    lr_scale(1, 1, group["adjust_lr"])  # raises if there is no such scale
    for name, parameter in named.named_parameters:
        _check_member(name, parameter)
        if group["algorithm"] == "muon":
            _check_matrix(name, parameter, flatten=group["flatten"])


def check_keys(named: NamedGroup, known: Collection[str]) -> None:
    """Check that a param group sets nothing that its optimizer does not read.

    Raises:
        UserError: naming the group and what it sets.
    """
    # What torch's schedulers leave in a group when they resume.
    unknown = sorted(set(named.settings) - set(known) - {"initial_lr"})
    if unknown:
        raise UserError(
            f"param group {named.name} sets {', '.join(unknown)}: not a hyperparameter of this "
            f"optimizer, which has {', '.join(sorted(known))}"
        )


def check_numbers(values: Mapping[str, Any]) -> None:
    """Check hyperparameters that are numbers; a schedule may change them between steps.

    Raises:
        UserError: naming the hyperparameter.
    """
    for key, value in values.items():
        if not 0 <= _number(value) < _LIMITS[key]:
            is_fraction = _LIMITS[key] == 1
            rule = "a number in [0, 1)" if is_fraction else "a finite number of at least 0"
            raise UserError(f"{key}={value!r}: must be {rule}")


def check_step_numbers(group: dict[str, Any]) -> None:
    """Check a group of Muon's before a step, as `check_numbers`."""
    check_numbers({key: group[key] for key in _NUMBERS})


def check_unchanged(group: dict[str, Any], planned: PlannedGroup) -> None:
    """Check that a group still says what the plan was made for.

    Raises:
        UserError: naming the hyperparameter.
    """
    for key, value in (
        ("algorithm", planned.algorithm),
        ("flatten", planned.flatten),
        ("adjust_lr", planned.adjust_lr),
    ):
        if group[key] != value:
            raise UserError(
                f"param group {planned.name}: {key} was {value!r} when Muon was built and is now "
                f"{group[key]!r}; the plan rests on it: build the optimizer anew"
            )


def check_same_parameters(groups: Iterable[dict[str, Any]], built: Sequence[Tensor]) -> None:
    """Check that groups hold the parameters, in order, that the optimizer was built with.

    Raises:
        UserError: one was added, removed or replaced.
    """
    held = [parameter for group in groups for parameter in group["params"]]
    if len(held) != len(built) or any(a is not b for a, b in zip(held, built, strict=True)):
        raise UserError(
            f"the param groups hold {len(held)} parameters that are not the {len(built)} of "
            "construction: the plan rests on those; change values in place, or build the optimizer "
            "anew"
        )


def check_devices(named: Iterable[tuple[str, Tensor]]) -> None:
    """Check that parameters have memory, all on one device.

    Raises:
        UserError: naming a parameter.
    """
    first: tuple[str, torch.device] | None = None
    for name, parameter in named:
        device = local(parameter).device
        if device.type == "meta":
            raise UserError(f"parameter {name} is on meta: give it memory before the optimizer")
        first = first or (name, device)
        if device != first[1]:
            raise UserError(
                f"parameter {name} is on {device}, {first[0]} on {first[1]}: move them to one "
                "device, or build an optimizer for each"
            )


def check_shard(spec: ParameterSpec, parameter: Tensor) -> None:
    """Check that a rank holds the rows that its placements give it, as torch deals them.

    Raises:
        UserError: the shard has another shape.
    """
    held, planned = tuple(local(parameter).shape), local_shape(spec)
    if held != planned:
        raise UserError(
            f"parameter {spec.name} of shape {list(spec.shape)} has a local shard of shape "
            f"{list(held)} where its placements give {list(planned)}: shard it as "
            "distribute_tensor and fully_shard do"
        )


class GradientCheck:
    """Checks each parameter's gradient when it is first there.

    Later ones are taken to lie as it did: a look at each would cost the host at every step.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        self._unchecked = list(named_parameters)

    def check(self) -> None:
        """Check what is new.

        Raises:
            UserError: as `check_gradient`.
        """
        for name, parameter in self._unchecked:
            check_gradient(name, parameter)
        self._unchecked = [pair for pair in self._unchecked if pair[1].grad is None]


def check_gradient(name: str, parameter: Tensor) -> None:
    """Check that a gradient can be added to momentum shard by shard.

    Raises:
        UserError: it is sparse, or lies otherwise than its parameter.
    """
    gradient = parameter.grad
    if gradient is None:
        return
    if gradient.layout != torch.strided:
        raise UserError(
            f"the gradient of {name} is sparse: momentum is dense; build its embedding with "
            "sparse=False"
        )
    lies, should_lie = placement_text(gradient), placement_text(parameter)
    if lies != should_lie:
        raise UserError(
            f"the gradient of {name} lies as {lies}, the parameter as {should_lie}: redistribute "
            "it to the parameter's placements before the step"
        )


def check_stats(interval: int, meshes: Iterable[DeviceMesh]) -> None:
    """Check that statistics can be summed over one mesh, which holds the ranks of all others.

    Raises:
        UserError: meshes overlap only in part.
    """
    members = [frozenset(mesh.mesh.flatten().tolist()) for mesh in meshes]
    widest = max(members, key=len, default=frozenset())
    if interval and not all(ranks <= widest for ranks in members):
        raise UserError(
            f"optim.stats_interval={interval}: parameters lie on meshes of ranks "
            f"{sorted(map(sorted, set(members)))}, none of which holds all: set it to 0"
        )


def check_flag(finite: Tensor | None, device: torch.device) -> None:
    """Check the flag that lets a step through, without reading it.

    Args:
        finite: The flag; None: there is none.
        device: Of the parameters, whose kernels read the flag by its address.

    Raises:
        UserError: it is no 0-d bool tensor there.
    """
    if finite is None:
        return
    is_flag = isinstance(finite, Tensor) and finite.dtype == torch.bool and finite.ndim == 0
    if not is_flag:
        raise UserError(
            f"finite={finite!r}: must be a bool tensor of no dim on the parameters' device, such "
            "as loss.detach().isfinite(), or None"
        )
    if finite.device != device:
        raise UserError(
            f"finite is on {finite.device}, the parameters are on {device}: move it there"
        )


def refuse_copy(optimizer: torch.optim.Optimizer) -> TypeError:
    """Return what a copy or pickle of an optimizer raises: torch would leave most of it behind."""
    return TypeError(
        f"{type(optimizer).__name__} holds process groups and cannot be copied or pickled: build "
        "another over the copied parameters and load_state_dict() the first one's state_dict()"
    )


def _number(value: Any) -> float:
    """Return a number, or nan for what is none."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else math.nan
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan


def _check_member(name: str, parameter: Tensor) -> None:
    dtype = str(parameter.dtype).removeprefix("torch.")
    if dtype not in BYTES:
        raise UserError(
            f"parameter {name} is of {dtype}: Muon updates {', '.join(BYTES)}; leave it out"
        )


def _check_matrix(name: str, parameter: Tensor, *, flatten: bool) -> None:
    if parameter.ndim < 2:
        raise UserError(
            f"parameter {name} of shape {list(parameter.shape)} is no matrix: Muon needs two dims "
            "or more; put it in an adamw group"
        )
    shard = local(parameter)
    try:
        view_as_matrices(shard, flatten=flatten)
    except UserError as error:
        raise UserError(
            f"parameter {name} of shape {list(parameter.shape)} and strides {shard.stride()} is no "
            "view of matrices: make it contiguous before building the optimizer"
        ) from error
