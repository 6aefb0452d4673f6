"""torch's AdamW and SGD behind the same gate as Muon: a non-finite step changes nothing.

Owns the stepping over local shards (torch's fused kernels, which take the gate as `found_inf`) and
state that exists from construction, so that its keys agree on all ranks. Arithmetic and state keys
are torch's. Gradients that some ranks lack are treated as Muon treats them: see `presence.py`.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from trainer.errors import UserError
from trainer.optim.adamw import AdamWSettings, AdamWTensors, adamw_step_
from trainer.optim.agreement import plan_agreements
from trainer.optim.checks import (
    GradientCheck,
    check_devices,
    check_flag,
    check_keys,
    check_numbers,
    refuse_copy,
)
from trainer.optim.fused import found_inf, in_step
from trainer.optim.gate import FiniteGate
from trainer.optim.groups import parse_groups
from trainer.optim.presence import Presence
from trainer.optim.spec import describe_parameters
from trainer.optim.state import local
from trainer.optim.timing import PhaseTimer, StepTimes


class GatedOptimizer(torch.optim.Optimizer):
    """What AdamW and SGD share: the gate, the clock, the order of a step. Abstract.

    Collective: construction makes and warms process groups, on every rank of every mesh.
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        groups = parse_groups(params)
        for group in groups:
            check_keys(group, defaults)
        super().__init__([group.as_param_group() for group in groups], defaults)
        named = [pair for group in groups for pair in group.named_parameters]
        check_devices(named)
        self._parameters = [parameter for _, parameter in named]
        specs, meshes = describe_parameters(named)
        self._presence = Presence(plan_agreements(specs), meshes, named)
        self._gradients = GradientCheck(named)
        self._gate = FiniteGate()
        self._device = local(self._parameters[0]).device
        self._timer = PhaseTimer(self._device)
        for group in self.param_groups:
            self._check_group(group)
            for parameter in group["params"]:
                self.state[parameter] = self._init_state(parameter, group)

    def _check_group(self, group: dict[str, Any]) -> None:
        """Check the hyperparameters of a group."""
        raise NotImplementedError

    def _init_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def _update_(
        self, parameters: Sequence[Tensor], group: dict[str, Any], gate: Tensor | None
    ) -> None:
        """Update parameters of one group under one gate."""
        raise NotImplementedError

    @torch.no_grad()
    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Callable[[], float] | None = None, *, finite: Tensor | None = None
    ) -> float | None:
        """Update state and weights.

        Args:
            closure: Evaluates the model again and returns the loss.
            finite: 0-d bool on the device: False leaves weights and state as they are.

        Raises:
            UserError: a hyperparameter has left its range; a gradient lies otherwise than its
                parameter; or, of the step before, as `settle`.

        Collective: the small all-reduces of `presence.py`; all ranks of the meshes.
        """
        check_flag(finite, self._device)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._check_group(group)
        self._gradients.check()
        self.settle()
        self._presence.launch([p.grad is not None for p in self._parameters])
        is_open = self._presence.gate_step(finite)
        self._gate.record(is_open)
        gates = self._presence.gate_parameters(is_open)
        with self._timer.measure("update"):
            self._update_groups_(dict(zip(self._parameters, gates, strict=True)), is_open)
        self._presence.wait()
        self._timer.end_step()
        return loss

    def _update_groups_(self, gate_of: dict[Tensor, Tensor | None], is_open: Tensor | None) -> None:
        index_of = {parameter: index for index, parameter in enumerate(self._parameters)}
        for group in self.param_groups:
            self._update_([p for p in group["params"] if p.grad is not None], group, is_open)
            for parameter in group["params"]:
                is_asked = self._presence.may_be_elsewhere(index_of[parameter])
                if parameter.grad is None and is_asked:
                    self._update_([parameter], group, gate_of[parameter])

    def settle(self) -> bool:
        """Return whether the last step was applied; waits for its flag, no more.

        Raises:
            UserError: the step was refused, a parameter's gradient being there on some copies of
                a shard only. On all ranks; weights and state are as before that step.
        """
        is_news = self._gate.is_pending
        was_applied = self._gate.settle()
        if is_news and not was_applied:
            self._presence.refuse_mixed()
        return was_applied

    def phase_times(self) -> Callable[[], dict[str, float]]:
        """Return a reader of the last step's `optim/update_ms`; reading waits for the device."""
        return partial(_read_update_ms, self._timer.last_step)

    def timings(self) -> dict[str, float]:
        """Return `optim/update_ms` of the latest step that the device has finished."""
        return {k: v for k, v in self._timer.timings().items() if k == "optim/update_ms"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of torch's; what it lacks is made fresh."""
        self.settle()
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for parameter in group["params"]:
                fresh = self._init_state(parameter, group)
                held = {k: v for k, v in self.state[parameter].items() if v is not None}
                self.state[parameter] = {**fresh, **held}

    def __reduce__(self) -> Any:
        """Refuse copies and pickles, which torch would make without gate and process groups."""
        raise refuse_copy(self)


def _read_update_ms(times: StepTimes) -> dict[str, float]:
    return {"optim/update_ms": times.read()["optim/update_ms"]}


class AdamW(GatedOptimizer):
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

    def _update_(
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


class SGD(GatedOptimizer):
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
        }
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_numbers({key: group[key] for key in ("lr", "weight_decay", "momentum")})
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

    def _update_(
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
