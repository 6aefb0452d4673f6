"""torch's AdamW and SGD behind the same gate as Muon: a non-finite step changes nothing.

Owns the stepping over local shards (torch's fused kernels, which take the gate as `found_inf`) and
state that exists from construction, so that its keys agree on all ranks. Arithmetic and state keys
are torch's. Elementwise, so no collective: a gradient missing on this rank leaves this rank's shard
alone.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from trainer.optim.gate import FiniteGate, found_inf
from trainer.optim.state import local
from trainer.optim.timing import PhaseTimer, StepTimes


class GatedOptimizer(torch.optim.Optimizer):
    """What AdamW and SGD share: the gate, the clock, the order of a step. Abstract."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        device = local(self.param_groups[0]["params"][0]).device
        self._gate = FiniteGate()
        self._timer = PhaseTimer(device)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = self._init_state(parameter, group)

    def _init_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def _update_(self, group: dict[str, Any], finite: Tensor | None) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Callable[[], float] | None = None, *, finite: Tensor | None = None
    ) -> float | None:
        """Update state and weights.

        Args:
            closure: Evaluates the model again and returns the loss.
            finite: 0-d bool on the device: False leaves weights and state as they are.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.settle()
        self._gate.record(finite)
        with self._timer.measure("update"):
            for group in self.param_groups:
                self._update_(group, finite)
        self._timer.end_step()
        return loss

    def settle(self) -> bool:
        """Return whether the last step was applied; waits for its flag, no more."""
        return self._gate.settle()

    def phase_times(self) -> Callable[[], dict[str, float]]:
        """Return a reader of the last step's `optim/update_ms`; reading waits for the device."""
        return partial(_read_update_ms, self._timer.last_step)

    def timings(self) -> dict[str, float]:
        """Return `optim/update_ms` of the latest step that the device has finished."""
        return {k: v for k, v in self._timer.timings().items() if k == "optim/update_ms"}


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

    def _init_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {
            "step": torch.zeros((), dtype=torch.float32, device=local(parameter).device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }

    def _update_(self, group: dict[str, Any], finite: Tensor | None) -> None:
        present = [p for p in group["params"] if p.grad is not None]
        filled = [p for p in present if local(p).numel()]
        self._count_empty_shards(present, finite)
        if not filled:
            return
        states = [self.state[p] for p in filled]
        beta1, beta2 = group["betas"]
        adamw(
            [local(p) for p in filled],
            [local(p.grad) for p in filled],
            [local(s["exp_avg"]) for s in states],
            [local(s["exp_avg_sq"]) for s in states],
            [],
            [s["step"] for s in states],
            fused=True,
            found_inf=found_inf(finite),  # pyright: ignore[reportArgumentType]
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _count_empty_shards(self, present: list[Tensor], finite: Tensor | None) -> None:
        """Advance step counts that the kernel does not see, so that all ranks hold the same."""
        for parameter in present:
            if not local(parameter).numel():
                self.state[parameter]["step"] += 1.0 if finite is None else finite.float()


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

    def _init_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        # Zeros make the first step torch's own: its buffer starts as the gradient.
        if not group["momentum"]:
            return {}
        return {"momentum_buffer": torch.zeros_like(parameter, requires_grad=False)}

    def _update_(self, group: dict[str, Any], finite: Tensor | None) -> None:
        filled = [p for p in group["params"] if p.grad is not None and local(p).numel()]
        if not filled:
            return
        has_momentum = bool(group["momentum"])
        buffers: list[Tensor | None] = [
            local(self.state[p]["momentum_buffer"]) if has_momentum else None for p in filled
        ]
        sgd(
            [local(p) for p in filled],
            [local(p.grad) for p in filled],
            buffers,
            fused=True,
            found_inf=found_inf(finite),
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=float(group["lr"]),
            dampening=0.0,
            nesterov=group["nesterov"],
            maximize=False,
        )
