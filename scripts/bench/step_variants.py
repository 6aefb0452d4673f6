"""The optimizers that muon_step.py compares: ours, dion's three ways, AdamW.

All of Muon's iterate five steps with the quintic rows on the same matrices (`split_gate_up` off),
save where a variant's name says otherwise.
"""

from collections.abc import Callable, Sequence

import torch
from baselines import SEED, find_baselines
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from trainer.config.optim import AdamWConfig, DionConfig, MuonConfig
from trainer.errors import UserError
from trainer.optim import setup_optimizer
from trainer.optim.groups import sort_parameters
from trainer.optim.setup import param_groups

Build = Callable[[nn.Module, DeviceMesh], torch.optim.Optimizer]

LR = 2e-4
HEADLINE = "ours"
BASELINE = "dion_quack"


def _ours(**settings: object) -> Build:
    config = MuonConfig.model_validate({"lr": LR, **settings})
    return lambda model, mesh: setup_optimizer(config, model.named_parameters(), mesh)


def _adamw(model: nn.Module, mesh: DeviceMesh) -> torch.optim.Optimizer:
    return setup_optimizer(AdamWConfig(lr=LR), model.named_parameters(), mesh)


def _dion(**settings: object) -> Build:
    config = DionConfig.model_validate({"lr": LR, **settings})
    return lambda model, mesh: setup_optimizer(config, model.named_parameters(), mesh)


def _dion_quack(model: nn.Module, mesh: DeviceMesh) -> torch.optim.Optimizer:
    device = torch.device(mesh.device_type)
    seed = find_baselines([SEED], torch.bfloat16, device).get(SEED)
    try:
        from trainer.optim.dion import DionMuon
    except ImportError as error:
        raise UserError(f"optim.type='dion': importing it failed ({error})") from error
    if seed is None:
        raise UserError("optim.type='dion' with the seed's function: needs QuACK and a GPU")

    def newton_schulz(X: Tensor, epsilon: float) -> Tensor:
        return seed(X.to(torch.bfloat16))

    config = DionConfig(lr=LR)
    groups = param_groups(sort_parameters(model.named_parameters()), config)
    return DionMuon.from_config(config, groups, newton_schulz_func=newton_schulz)


VARIANTS: dict[str, Build] = {
    HEADLINE: _ours(),
    "ours_fp16": _ours(ns_dtype="float16"),
    BASELINE: _dion_quack,
    "dion_triton": _dion(use_triton=True),
    "dion_dense": _dion(),
    "adamw": _adamw,
    "ours_symmetric": _ours(kernel="symmetric"),
    "ours_small_stacks": _ours(max_stack_gib=0.5),
    "ours_large_stacks": _ours(max_stack_gib=8.0),
    "ours_split_gate_up": _ours(split_gate_up=True),
    "ours_per_matrix": _ours(impl="per_matrix"),
}
DEFAULTS: Sequence[str] = list(VARIANTS)[:6]
