"""The optimizer state, laid out as dion.Muon's at 0a059a4, and its repair after a load.

Owns the keys: `momentum` for every parameter, in the parameter's dtype and placement; `variance`
and a float32 scalar `step_dev` for AdamW. All exist from construction, so that the set of keys is
the same on every rank and before the first step.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.errors import UserError


def init_state(parameter: Tensor, algorithm: str) -> dict[str, Tensor]:
    """Return fresh state of a parameter."""
    state = {"momentum": torch.zeros_like(parameter, requires_grad=False)}
    if algorithm == "adamw":
        state["variance"] = torch.zeros_like(parameter, requires_grad=False)
        state["step_dev"] = torch.zeros((), dtype=torch.float32, device=local(parameter).device)
    return state


def local(tensor: Tensor) -> Tensor:
    """Return a DTensor's shard, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_matrices(local_tensor: Tensor, *, flatten: bool) -> Tensor:
    """Return a local shard as [local_B, rows, cols], to read: a copy where strides ask for one."""
    return local_tensor.reshape(_shape_of_matrices(local_tensor, flatten))


def view_as_matrices(local_tensor: Tensor, *, flatten: bool) -> Tensor:
    """Return a local shard as [local_B, rows, cols], to write to: never a copy.

    Raises:
        UserError: its strides allow no view.
    """
    try:
        return local_tensor.view(_shape_of_matrices(local_tensor, flatten))
    except RuntimeError as error:
        raise UserError(
            f"a weight or momentum of shape {list(local_tensor.shape)} has strides "
            f"{local_tensor.stride()}, no view of matrices: its memory format was changed after "
            "the optimizer was built; make it contiguous again, or build the optimizer anew"
        ) from error


def _shape_of_matrices(local_tensor: Tensor, flatten: bool) -> tuple[int, int, int]:
    shape = local_tensor.shape
    first = 0 if flatten and len(shape) > 2 else len(shape) - 2
    return shape[:first].numel(), shape[first], shape[first + 1 :].numel()


def check_loaded(loaded: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    """Check that a state dict fits by position: algorithms, shapes and placements agree.

    Raises:
        UserError: naming the group or the place that differs.
    """
    _check_kind(loaded)
    saved_groups = loaded["param_groups"]
    ours = [(group["algorithm"], len(group["params"])) for group in groups]
    saved = [(group["algorithm"], len(group["params"])) for group in saved_groups]
    if ours != saved:
        raise UserError(
            f"the optimizer state has groups (algorithm, parameters) {saved}, this optimizer has "
            f"{ours}: load it by name, or build the optimizer with the groups it was saved with"
        )
    ids = [i for group in saved_groups for i in group["params"]]
    parameters = [p for group in groups for p in group["params"]]
    for place, (i, parameter) in enumerate(zip(ids, parameters, strict=True)):
        for key in ("momentum", "variance"):
            value = loaded["state"].get(i, {}).get(key)
            if value is not None:
                _check_value(f"the optimizer state's {key} {place}", value, parameter)


def _check_kind(loaded: dict[str, Any]) -> None:
    needed = {"algorithm", "params", "step", "lr"}
    lacking = {"state", "param_groups"} - set(loaded)
    lacking |= {key for group in loaded.get("param_groups", []) for key in needed - set(group)}
    if lacking:
        raise UserError(
            f"the optimizer state lacks {', '.join(sorted(lacking))}: it is not a state of Muon "
            "or dion.Muon; load the one that was saved with this optimizer"
        )


def _check_value(what: str, value: Tensor, parameter: Tensor) -> None:
    if value.shape != parameter.shape:
        raise UserError(
            f"{what} has shape {list(value.shape)}, the parameter there has "
            f"{list(parameter.shape)}: load it by name"
        )
    lies, should_lie = placement_text(value), placement_text(parameter)
    if lies != should_lie:
        raise UserError(
            f"{what} lies as {lies}, the parameter there as {should_lie}: "
            "load it through torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
        )


def placement_text(tensor: Tensor) -> str:
    """Return how a tensor lies over ranks, as messages say it."""
    if not isinstance(tensor, DTensor):
        return "a plain tensor"
    return f"{tensor.placements} over {tuple(tensor.device_mesh.shape)} ranks"


def restore_dtypes(
    state: dict[Tensor, dict[str, Any]], groups: list[dict[str, Any]], loaded: dict[str, Any]
) -> None:
    """Put loaded state back in its own dtype, in the strides of its parameter.

    torch casts it to the parameter's dtype, and leaves the strides that it was saved with. A
    momentum saved in float32 stays so beside bfloat16 weights, and `step_dev` is float32 always (in
    bfloat16 it would stop counting at 256).

    Args:
        state: The optimizer's state after torch's `load_state_dict`.
        groups: Its param groups.
        loaded: The state dict that was loaded.
    """
    ids = [i for group in loaded["param_groups"] for i in group["params"]]
    parameters = [p for group in groups for p in group["params"]]
    for parameter, i in zip(parameters, ids, strict=True):
        device = local(parameter).device
        for key, value in loaded["state"].get(i, {}).items():
            if isinstance(value, Tensor):
                dtype = torch.float32 if key == "step_dev" else value.dtype
                value = value.to(device=device, dtype=dtype)
                state[parameter][key] = _in_layout_of(parameter, value)


def _in_layout_of(parameter: Tensor, value: Tensor) -> Tensor:
    """Return a loaded tensor, copied where it lies otherwise than its parameter of that shape."""
    is_alike = local(value).stride() == local(parameter).stride()
    if is_alike or value.shape != parameter.shape:
        return value
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def complete_state(state: dict[Tensor, dict[str, Any]], group: dict[str, Any]) -> None:
    """Fill in what an older or partial state lacks.

    Older dion states have no `step_dev`: bias correction goes on from the group's `step`.
    """
    for parameter in group["params"]:
        fresh = init_state(parameter, group["algorithm"])
        if "step_dev" in fresh and "momentum" in state[parameter]:
            fresh["step_dev"].fill_(float(group["step"]))
        state[parameter] = {**fresh, **state[parameter]}
