"""Muon over sharded parameters: every whole matrix orthogonalized once, wherever its pieces lie.

Owns the optimizer that torch, schedulers and checkpoints see. The recurrence, per matrix:

    m <- mu * m + g         u = m   (nesterov: mu * m + g)
    O = NewtonSchulz(u)     w <- w * (1 - lr * weight_decay) - lr * s * O

with s = 0.2 * sqrt(max(rows, cols)) (`adjust_lr = "rms_norm"`), sqrt(rows / cols)
("spectral_norm") or 1 (None), from the matrix's global shape. What a rank does is decided in
`plan.py` and carried out in `pipeline.py`; read those next.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from trainer.optim.adamw_groups import step_adamw_groups_
from trainer.optim.checks import (
    check_devices,
    check_group,
    check_shard,
    check_stats,
    check_step_numbers,
    check_unchanged,
)
from trainer.optim.coefficients import CoefficientTable
from trainer.optim.exchange import Exchange
from trainer.optim.gated import GatedOptimizer, on_device
from trainer.optim.groups import NamedGroup, parse_groups
from trainer.optim.kernels.normalize import normalized_copy
from trainer.optim.kernels.products import Target
from trainer.optim.kernels.select import KernelChoice
from trainer.optim.newton_schulz import (
    newton_schulz,
    orthogonalize_normalized_,
    update_weights_,
)
from trainer.optim.options import MuonOptions, choose_kernel_of, plan_with_kernels
from trainer.optim.per_matrix import PerMatrixStep
from trainer.optim.per_matrix_pricing import price_per_matrix
from trainer.optim.pipeline import NS_DTYPES, StackedStep, StepInputs
from trainer.optim.pipeline_memory import Passes
from trainer.optim.plan import PlannedGroup
from trainer.optim.pricing import Price, price_plan
from trainer.optim.process_groups import make_groups
from trainer.optim.state import (
    check_loaded,
    complete_state,
    init_state,
    restore_dtypes,
)
from trainer.optim.stats import UpdateStats
from trainer.optim.timing import StepTimes


class _Iteration(TypedDict):
    """What every Newton-Schulz function takes."""

    steps: int
    coefficients: CoefficientTable


class Muon(GatedOptimizer):
    """Muon for matrices, AdamW for the rest.

    Args:
        params: Parameters, (name, parameter) pairs, or param groups of either. A group may set any
            of the hyperparameters below, `algorithm` ("muon", the default, or "adamw") and `name`
            (for tables and metrics; it does not stay in the group).
        lr: Learning rate, at least 0.
        mu: Momentum factor of Muon, in [0, 1).
        betas: Of AdamW.
        weight_decay: Decoupled; each step takes lr * weight_decay of a weight.
        cautious_wd: Decay only where update and weight agree in sign.
        epsilon: Of AdamW; unused by Muon.
        nesterov: Orthogonalize mu * m + g.
        adjust_lr: The update's factor s.
        flatten: A muon parameter of three or more dims is one matrix, its first dim against the
            rest; False: it is a stack of matrices over its last two dims.
        options: How the update is computed.

    Momentum is held in the parameter's dtype. Entries of a gradient up to (1 - mu) times its
    largest number never overflow it (1.7e37 in float32 at the default); larger ones do if they
    last, so clip them or let `finite` say no.

    Parameters may be plain tensors, which each process updates by itself, or DTensors. A gradient
    that some ranks lack counts as zeros there; one that all ranks lack leaves its parameter
    alone. Where only some copies of one shard have it, the step is refused on all ranks; the next
    `settle` raises, naming the parameter (`presence.py`).

    Raises:
        UserError: a hyperparameter, a placement or a kernel asked for is not possible.

    Collective: construction makes and warms process groups, on every rank of every mesh, in the
    order of the parameters.

    Example:
        >>> weight = torch.nn.Parameter(torch.eye(2))
        >>> weight.grad = torch.eye(2)
        >>> Muon([weight], lr=0.1, options=MuonOptions(ns_dtype="float32")).step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        mu: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.01,
        *,
        cautious_wd: bool = False,
        epsilon: float = 1e-8,
        nesterov: bool = False,
        adjust_lr: Literal["rms_norm", "spectral_norm"] | None = "rms_norm",
        flatten: bool = False,
        options: MuonOptions | None = None,
    ) -> None:
        beta1, beta2 = betas
        defaults = {
            "lr": lr,
            "mu": mu,
            "beta1": beta1,
            "beta2": beta2,
            "weight_decay": weight_decay,
            "cautious_wd": cautious_wd,
            "algorithm": "muon",
            "step": 0,
            "epsilon": epsilon,
            "nesterov": nesterov,
            "flatten": flatten,
            "adjust_lr": adjust_lr,
        }
        groups = parse_groups(params)
        self._options = options or MuonOptions()
        super().__init__(groups, defaults)
        self._group_names = [group.name for group in groups]
        self._settings = [_settings_of(group) for group in self.param_groups]
        self._stats: UpdateStats | None = None
        with on_device(self._device):
            self._build_steps()

    def _build_steps(self) -> None:
        """Make what carries out a step under either `impl`.

        Collective: group creation and warming; every rank of every mesh.
        """
        self._exchange = Exchange(self._device, self._timer)
        self._stacked = StackedStep(
            self.plan,
            make_groups(self.plan, self._meshes),
            self._exchange,
            self._timer,
            self.kernels,
            self._orthogonalize_stack,
        )
        self._per_matrix = PerMatrixStep(
            self._specs,
            self._meshes,
            self._timer,
            self._newton_schulz,
            split_gate_up=self._options.split_gate_up,
        )

    def _check(self, groups: Sequence[NamedGroup]) -> None:
        """Check all that was asked for, and plan the step."""
        check_devices(pair for group in groups for pair in group.named_parameters)
        for group, named in zip(self.param_groups, groups, strict=True):
            check_group(group, named)
        for spec, parameter in zip(self._specs, self._parameters, strict=True):
            check_shard(spec, parameter)
        check_stats(self._options.stats_interval, self._meshes.values())
        specs = iter(self._specs)
        self._planned_groups = [
            PlannedGroup(
                named.name,
                group["algorithm"],
                tuple(islice(specs, len(group["params"]))),
                group["flatten"],
                group["adjust_lr"],
            )
            for named, group in zip(groups, self.param_groups, strict=True)
        ]
        self.plan, self.kernels = plan_with_kernels(
            self._planned_groups, self._options, self._device
        )

    def _init_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return init_state(parameter, group["algorithm"])

    # The step.

    def _check_settings(self) -> None:
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "Muon.step() was called under CUDA graph capture, which would freeze lr, "
                "weight_decay and the set of gradients: call it outside the graph"
            )
        for group, planned in zip(self.param_groups, self._planned_groups, strict=True):
            check_step_numbers(group)
            check_unchanged(group, planned)

    def _count_steps(self, change: int) -> None:
        for group in self.param_groups:
            group["step"] += change

    def _update_(self, is_open: Tensor | None, gates: Sequence[Tensor | None]) -> None:
        """Update momentum, state and weights.

        Collective: with `impl` "stacked" the exchanges in the order of the plan's slots, with
            "per_matrix" one all-reduce for each sharding axis and parameter, in order; then those
            of the statistics, on steps that collect them. All ranks of the meshes.
        """
        stats = self._begin_stats()
        inputs = StepInputs(self._parameters, self._momentum, self.param_groups, gates, stats)
        step_others_ = partial(step_adamw_groups_, inputs, self.state, self._timer)
        if self._options.impl == "stacked":
            self._stacked.run(inputs, step_others_)
        else:
            self._per_matrix.run(inputs)
            step_others_()
        if stats is not None:
            self._presence.wait()
            stats.reduce(self._presence.widest_group)
        self._stats = stats

    def _momentum(self, index: int) -> Tensor:
        return self.state[self._parameters[index]]["momentum"]

    def _orthogonalize_stack(
        self,
        stack_BMN: Tensor,
        kernel: KernelChoice,
        *,
        is_normalized: bool,
        targets: Sequence[Target] | None,
    ) -> Tensor | None:
        if not is_normalized:
            stack_BMN = normalized_copy(stack_BMN, NS_DTYPES[self._options.ns_dtype])
        if targets is None:
            return orthogonalize_normalized_(stack_BMN, **self._iteration, kernel=kernel)
        update_weights_(stack_BMN, targets, **self._iteration, kernel=kernel)
        return None

    def _newton_schulz(self, stack_BMN: Tensor) -> Tensor:
        return newton_schulz(
            stack_BMN,
            **self._iteration,
            dtype=NS_DTYPES[self._options.ns_dtype],
            kernel=self._options.kernel,
        )

    @property
    def _iteration(self) -> _Iteration:
        return {
            "steps": self._options.ns_steps,
            "coefficients": self._options.ns_coefficients,
        }

    # What the loop asks.

    @property
    def impl(self) -> Literal["stacked", "per_matrix"]:
        """How a step is carried out."""
        return self._options.impl

    def price(self) -> Price:
        """Return what a step costs on this rank: FLOPs, bytes over each axis, temporaries."""
        if self._options.impl == "per_matrix":
            return price_per_matrix(
                self._planned_groups,
                partial(choose_kernel_of, self._options, self._device),
                ns_dtype=self._options.ns_dtype,
                split_gate_up=self._options.split_gate_up,
                **self._iteration,
            )
        return price_plan(
            self.plan,
            self._planned_groups,
            self.kernels,
            **self._iteration,
            passes=Passes(
                is_by_table=self._device.type == "cuda",
                is_cautious=any(group["cautious_wd"] for group in self.param_groups),
            ),
        )

    def phase_times(self) -> Callable[[], dict[str, float]]:
        """Return a reader of the last step's metrics; reading waits for the device.

        Milliseconds of each phase, and the update's statistics on steps that collect them.
        """
        return partial(_read_metrics, self._timer.last_step, self._stats)

    def _begin_stats(self) -> UpdateStats | None:
        interval = self._options.stats_interval
        if not interval or self.param_groups[0]["step"] % interval:
            return None
        return UpdateStats(self._group_names, self._device)

    # Checkpoints.

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of dion.Muon.

        Loaded tensors keep their dtype. The settings given at construction stay in force, except
        `lr`, which like `step` comes with the state: it is the schedule's. See `reapply_settings`.

        Raises:
            UserError: parameters differ in number, shape or algorithm.
        """
        self.settle()
        loaded: dict[str, Any] = {}

        def check(_: torch.optim.Optimizer, hooked: dict[str, Any]) -> None:
            check_loaded(hooked, self.param_groups)
            loaded.update(hooked)

        # As torch's hooks: what others make of the state dict is what is checked and restored.
        handles = [
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(lambda _: self._restore(loaded), prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _restore(self, loaded: dict[str, Any]) -> None:
        """Mend what torch's load did to dtypes, settings and keys that are missing."""
        restore_dtypes(self.state, self.param_groups, loaded)
        for group, settings in zip(self.param_groups, self._settings, strict=True):
            group.update({key: value for key, value in settings.items() if key != "lr"})
            group.update(step=int(group["step"]), lr=float(group["lr"]))
            complete_state(self.state, group)

    def reapply_settings(self) -> None:
        """Put every setting given at construction back in force, `lr` too; `step` stays."""
        for group, settings in zip(self.param_groups, self._settings, strict=True):
            group.update(settings)


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return what was given for a group; schedulers write into a tensor, so of one its value."""
    return {
        key: float(value) if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key not in ("params", "step")
    }


def _read_metrics(times: StepTimes, stats: UpdateStats | None) -> dict[str, float]:
    return times.read() | ({} if stats is None else stats.read())
