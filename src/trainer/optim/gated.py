"""What all optimizers here have in common: the order of a step, its gate, its agreement on ranks.

Owns the abstract base. What is updated, and how, is `muon.py`'s and `torch_optimizers.py`'s.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainer.errors import UserError
from trainer.optim.agreement import plan_agreements
from trainer.optim.checks import (
    GradientCheck,
    check_flag,
    check_same_parameters,
    refuse_copy,
)
from trainer.optim.gate import FiniteGate
from trainer.optim.groups import NamedGroup
from trainer.optim.interface import TrainerOptimizer
from trainer.optim.presence import Presence
from trainer.optim.process_groups import together
from trainer.optim.spec import describe_parameters, held_meshes
from trainer.optim.state import local
from trainer.optim.timing import PhaseTimer


class GatedOptimizer(TrainerOptimizer):
    """A step that a device flag lets through or not, the same on all ranks. Abstract.

    State exists from construction, so that its keys agree on all ranks.

    Args:
        groups: Param groups with the names of their parameters.
        defaults: Hyperparameters of groups that do not set them.

    Raises:
        UserError: `_check` refuses, on this rank or another.

    Collective: construction agrees on what is refused and makes and warms process groups, on every
        rank of every mesh, in the order of the parameters.
    """

    _is_built = False

    def __init__(self, groups: Sequence[NamedGroup], defaults: dict[str, Any]) -> None:
        super().__init__([group.as_param_group() for group in groups], defaults)
        self._is_built = True
        named = [pair for group in groups for pair in group.named_parameters]
        self._parameters = [parameter for _, parameter in named]
        self._device = local(self._parameters[0]).device
        with on_device(self._device):
            self._build(groups, named)

    def _build(self, groups: Sequence[NamedGroup], named: Sequence[tuple[str, Tensor]]) -> None:
        # Not those of `describe_parameters`, which may refuse on some ranks only.
        together(held_meshes(named), partial(self._describe_and_check, groups, named))
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = self._init_state(parameter, group)
        self._gate = FiniteGate()
        self._timer = PhaseTimer(self._device)
        self._presence = Presence(plan_agreements(self._specs), self._meshes, named)
        self._gradients = GradientCheck(named)

    def _describe_and_check(
        self, groups: Sequence[NamedGroup], named: Sequence[tuple[str, Tensor]]
    ) -> None:
        self._specs, self._meshes = describe_parameters(named)
        self._check(groups)

    def _check(self, groups: Sequence[NamedGroup]) -> None:
        """Check what was asked for, without collectives."""
        raise NotImplementedError

    def _check_settings(self) -> None:
        """Check what may have changed since the last step."""
        raise NotImplementedError

    def _init_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def _update_(self, is_open: Tensor | None, gates: Sequence[Tensor | None]) -> None:
        """Update everything.

        Args:
            is_open: The whole step's gate, 0-d bool; None: open.
            gates: Each parameter's, in order.
        """
        raise NotImplementedError

    def _count_steps(self, change: int) -> None:
        """Change step counts that the host keeps; there are none unless a subclass says so."""

    @torch.no_grad()
    def step(
        self, closure: Callable[[], float] | None = None, *, finite: Tensor | None = None
    ) -> float | None:
        """Update state and weights.

        Args:
            closure: Evaluates the model again and returns the loss.
            finite: 0-d bool on the device, equal on all ranks: False leaves weights, state and
                step counts as they are. The host's counts follow in `settle`.

        Raises:
            UserError: the parameters are not those that the optimizer was built with; a
                hyperparameter has left its range, or changed where the optimizer rests on it; a
                gradient lies otherwise than its parameter; or, of the step before, as
                `settle`.

        Collective: the agreements of `Presence`, those of copies first, then the update's own; all
            ranks of the meshes.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with on_device(self._device):
            self._step(finite)
        return loss

    def _step(self, finite: Tensor | None) -> None:
        check_flag(finite, self._device)
        check_same_parameters(self.param_groups, self._parameters)
        self._check_settings()
        self._gradients.check()
        self.settle()
        self._presence.launch([p.grad is not None for p in self._parameters])
        is_open = self._presence.gate_step(finite)
        self._gate.record(is_open)
        self._count_steps(1)
        self._update_(is_open, self._presence.gate_parameters(is_open))
        self._presence.wait()
        self._timer.end_step()

    def settle(self) -> bool:
        """Return whether the last step was applied; if not, take back the host's step counts.

        Waits for the last step's flag, no more. Calling it again changes nothing.

        Raises:
            UserError: the step was refused, a parameter's gradient being there on some copies of
                a shard only. On all ranks; the optimizer is as before that step.
        """
        is_news = self._gate.is_pending
        was_applied = self._gate.settle()
        if is_news and not was_applied:
            self._count_steps(-1)
            self._presence.refuse_mixed()
        return was_applied

    def phase_times(self) -> Callable[[], dict[str, float]]:
        """Return a reader of the last step's `optim/<phase>_ms`; reading waits for the device."""
        return self._timer.last_step.read

    def timings(self) -> dict[str, float]:
        """Return the phases of the latest step that the device has finished, without a wait."""
        return self._timer.timings()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the last step settled."""
        self.settle()
        return super().state_dict()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse, once built: ranks have agreed on all parameters."""
        if self._is_built:
            raise UserError(
                f"add_param_group after construction: {type(self).__name__} plans once, from all "
                "parameters; give it every group when it is built"
            )
        super().add_param_group(param_group)

    def __reduce__(self) -> Any:
        """Refuse copies and pickles, which torch would make without gate and process groups."""
        raise refuse_copy(self)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one for a `with` block: events and kernels go to its streams."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
