"""torch's AdamW and SGD behind the same gate as Muon: a non-finite step changes nothing.

Owns the stepping over local shards, by torch's fused kernels. Arithmetic and state keys are
torch's. The gate, and gradients that some ranks lack, are `gated.py`'s.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from trainer.errors import UserError
from trainer.optim.adamw import AdamWSettings, AdamWTensors, adamw_step_
from trainer.optim.checks import (
    check_devices,
    check_keys,
    check_numbers,
)
from trainer.optim.fused import found_inf, in_step
from trainer.optim.gated import GatedOptimizer
from trainer.optim.groups import NamedGroup, parse_groups
from trainer.optim.state import local
from trainer.optim.timing import StepTimes

_SWITCHES = ("amsgrad", "maximize", "dampening")
"""Of torch's optimizers, on which the update depends."""


class ElementwiseOptimizer(GatedOptimizer):
    """What AdamW and SGD share. Abstract."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        super().__init__(parse_groups(params), defaults)

    def _check(self, groups: Sequence[NamedGroup]) -> None:
        for group in groups:
            check_keys(group, self.defaults)
        check_devices(pair for group in groups for pair in group.named_parameters)
        self._check_settings()

    def _check_settings(self) -> None:
        for group in self.param_groups:
            self._check_group(group)

    def _check_group(self, group: dict[str, Any]) -> None:
        """Check the hyperparameters of a group."""
        raise NotImplementedError

    def _update_(self, is_open: Tensor | None, gates: Sequence[Tensor | None]) -> None:
        index_of = {parameter: index for index, parameter in enumerate(self._parameters)}
        with self._timer.measure("update"):
            for group in self.param_groups:
                present = [p for p in group["params"] if p.grad is not None]
                self._update_group_(present, group, is_open)
                for parameter in group["params"]:
                    index = index_of[parameter]
                    if parameter.grad is None and self._presence.may_be_elsewhere(index):
                        self._update_group_([parameter], group, gates[index])

    def _update_group_(
        self, parameters: Sequence[Tensor], group: dict[str, Any], gate: Tensor | None
    ) -> None:
        """Update parameters of one group under one gate."""
        raise NotImplementedError

    def phase_times(self) -> Callable[[], dict[str, float]]:
        """Return a reader of the last step's `optim/update_ms`; reading waits for the device."""
        return partial(_read_update_ms, self._timer.last_step)

    def timings(self) -> dict[str, float]:
        """Return `optim/update_ms` of the latest step that the device has finished."""
        return {k: v for k, v in self._timer.timings().items() if k == "optim/update_ms"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of torch's; what it lacks is made fresh.

        Raises:
            UserError: it was made with a switch that this class has not.
        """
        self.settle()
        for group in state_dict["param_groups"]:
            for key in _SWITCHES:
                if group.get(key):
                    raise UserError(
                        f"the optimizer state was made with {key}={group[key]!r}, which "
                        f"{type(self).__name__} here has not: train on with torch's own, or set "
                        "it off there before saving"
                    )
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for parameter in group["params"]:
                fresh = self._init_state(parameter, group)
                held = {k: v for k, v in self.state[parameter].items() if v is not None}
                if "step" in held:
                    # torch's own counts on the host, unless it is fused.
                    held["step"] = held["step"].to(fresh["step"])
                self.state[parameter] = {**fresh, **held}


def _read_update_ms(times: StepTimes) -> dict[str, float]:
    return {"optim/update_ms": times.read()["optim/update_ms"]}


class AdamW(ElementwiseOptimizer):
    """torch.optim.AdamW, gated. State: `step`, `exp_avg`, `exp_avg_sq`."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": epsilon, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        numbers = {"beta1": beta1, "beta2": beta2, "epsilon": group["eps"]}
        check_numbers({"lr": group["lr"], "weight_decay": group["weight_decay"], **numbers})

    def _init_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {
            "step": torch.zeros((), dtype=torch.float32, device=local(parameter).device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }

    def _update_group_(
        self, parameters: Sequence[Tensor], group: dict[str, Any], gate: Tensor | None
    ) -> None:
        beta1, beta2 = group["betas"]
        settings = AdamWSettings(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            epsilon=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            cautious_wd=False,
        )
        adamw_step_([self._tensors(parameter) for parameter in parameters], settings, gate)

    def _tensors(self, parameter: Tensor) -> AdamWTensors:
        state = self.state[parameter]
        mean, mean_square = local(state["exp_avg"]), local(state["exp_avg_sq"])
        weight, gradient = local(parameter), _gradient(parameter)
        return AdamWTensors(weight, gradient, mean, mean_square, state["step"])


class SGD(ElementwiseOptimizer):
    """torch.optim.SGD, gated. State: `momentum_buffer`, with momentum."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            # torch's own asks for it in a state that it loads.
            "dampening": 0.0,
        }
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_numbers({key: group[key] for key in ("lr", "weight_decay", "momentum")})
        if group.get("dampening"):  # absent in older versions' states
            raise UserError(f"dampening={group['dampening']!r}: SGD here has none; set it to 0")
        if group["nesterov"] and not group["momentum"]:
            raise UserError(
                "optim.nesterov=true: there is no momentum to look ahead by; set optim.momentum "
                "above 0, or optim.nesterov=false"
            )

    def _init_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        # Zeros make the first step torch's own: its buffer starts as the gradient.
        if not group["momentum"]:
            return {}
        return {"momentum_buffer": torch.zeros_like(parameter, requires_grad=False)}

    def _update_group_(
        self, parameters: Sequence[Tensor], group: dict[str, Any], gate: Tensor | None
    ) -> None:
        filled = [p for p in parameters if local(p).numel()]
        if not filled:
            return
        momenta = [local(self.state[p]["momentum_buffer"]) for p in filled if group["momentum"]]
        with in_step([local(p) for p in filled]) as weights, in_step(momenta) as buffers:
            sgd(
                weights,
                [_gradient(p).to(local(p).dtype).contiguous() for p in filled],
                list(buffers or [None] * len(filled)),
                fused=True,
                found_inf=found_inf(gate),
                weight_decay=float(group["weight_decay"]),
                momentum=float(group["momentum"]),
                lr=float(group["lr"]),
                dampening=0.0,
                nesterov=group["nesterov"],
                maximize=False,
            )


def _gradient(parameter: Tensor) -> Tensor:
    """Return a parameter's local gradient, zeros where this rank lacks it."""
    shard = local(parameter)
    return torch.zeros_like(shard) if parameter.grad is None else local(parameter.grad)
