"""AdamW over the param groups of a Muon step that ask for it.

Owns which parameters are stepped together and under which gate; the arithmetic is `adamw.py`'s.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.optim.adamw import AdamWSettings, AdamWTensors, adamw_step_
from trainer.optim.flight import StepInputs
from trainer.optim.state import local
from trainer.optim.timing import PhaseTimer


def step_adamw_groups_(
    inputs: StepInputs, state: Mapping[Tensor, dict[str, Any]], timer: PhaseTimer
) -> None:
    """Update parameters and state of all groups with `algorithm = "adamw"`.

    Args:
        inputs: Of the whole step. Parameters whose gradient is here have one gate in common.
        state: By parameter, as `state.init_state` lays it out.
        timer: Counts the time towards `update`.
    """
    gate_of = dict(zip(inputs.parameters, inputs.gates, strict=True))
    for group in inputs.groups:
        if group["algorithm"] != "adamw":
            continue
        settings = _settings(group)
        present = [p for p in group["params"] if p.grad is not None]
        with timer.measure("update"):
            if present:
                tensors = [_tensors(p, state[p]) for p in present]
                adamw_step_(tensors, settings, gate_of[present[0]])
            for p in group["params"]:
                if p.grad is None:
                    adamw_step_([_tensors(p, state[p])], settings, gate_of[p])


def _settings(group: dict[str, Any]) -> AdamWSettings:
    return AdamWSettings(
        lr=float(group["lr"]),
        beta1=float(group["beta1"]),
        beta2=float(group["beta2"]),
        epsilon=float(group["epsilon"]),
        weight_decay=float(group["weight_decay"]),
        cautious_wd=group["cautious_wd"],
    )


def _tensors(parameter: Tensor, state: dict[str, Any]) -> AdamWTensors:
    weight = local(parameter)
    gradient = torch.zeros_like(weight) if parameter.grad is None else local(parameter.grad)
    momentum, variance = local(state["momentum"]), local(state["variance"])
    return AdamWTensors(weight, gradient, momentum, variance, state["step_dev"])
