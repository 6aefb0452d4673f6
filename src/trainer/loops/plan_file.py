"""What `plan.json` and wandb's config say of the optimizer: who does what, with which kernel."""

from typing import Any

from torch.optim import Optimizer

from trainer.optim import Muon


def describe_plan(optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's plan as plain JSON; for others than Muon, its class and groups."""
    match optimizer:
        case Muon():
            return {"impl": optimizer.impl, **optimizer.plan.as_dict()}
        case _:
            sizes = [len(group["params"]) for group in optimizer.param_groups]
            return {"optimizer": type(optimizer).__name__, "parameters_per_group": sizes}


def kernel_choices(optimizer: Optimizer) -> dict[str, str]:
    """Return, per shape, the kernel and why; empty for others than Muon."""
    match optimizer:
        case Muon():
            return optimizer.price().kernels
        case _:
            return {}
