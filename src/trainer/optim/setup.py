"""From the `[optim]` section to an optimizer: one choice of type, in one place.

Owns the hyperparameters of each group and the logging of the routing table. Which parameter is in
which group is `groups.py`'s.
"""

import logging
from collections.abc import Iterable

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from trainer.config.optim import AdamWConfig, DionConfig, DionMuonSection, MuonConfig, SGDConfig
from trainer.errors import UserError
from trainer.optim.groups import (
    GROUP_NAMES,
    NamedGroup,
    check_cover,
    group_of,
    list_pairs,
    sort_parameters,
)
from trainer.optim.interface import TrainerOptimizer
from trainer.optim.muon import Muon
from trainer.optim.options import MuonOptions
from trainer.optim.plan import PlannedGroup
from trainer.optim.spec import ParameterSpec
from trainer.optim.table import routing_table
from trainer.optim.torch_optimizers import SGD, AdamW

logger = logging.getLogger(__name__)


def setup_optimizer(
    config: MuonConfig | AdamWConfig | SGDConfig | DionConfig,
    named_parameters: Iterable[tuple[str, Tensor]],
    mesh: DeviceMesh | None = None,
) -> TrainerOptimizer:
    """Build the optimizer that the config asks for.

    Every optimizer returned has `step(closure=None, *, finite=None)`, `settle() -> bool` and
    `timings() -> dict[str, float]` beside torch's interface.

    Args:
        config: The `[optim]` section.
        named_parameters: Of the sharded model; frozen ones are left out.
        mesh: The model's root mesh; its first rank logs the routing table. None: one process. How
            parameters are sharded is read from themselves.

    Raises:
        UserError: the request cannot be honoured for these parameters on this machine.
        TypeError: `config` is no such section, or `named_parameters` no pairs.

    Collective: groups are made and warmed; all ranks of the mesh call.
    """
    named_parameters = list_pairs(named_parameters)
    groups = sort_parameters(named_parameters)
    check_cover(groups, named_parameters)
    match config:
        case MuonConfig():
            optimizer = _setup_muon(config, groups)
            if mesh is None or mesh.get_rank() == 0:
                logger.info("routing table\n%s", routing_table(optimizer.plan, grouped=True))
            return optimizer
        case DionConfig():
            return _setup_dion(config, groups)
        case AdamWConfig():
            return AdamW(
                _trainable(groups),
                lr=config.lr,
                betas=(config.betas1, config.betas2),
                epsilon=config.epsilon,
                weight_decay=config.weight_decay,
            )
        case SGDConfig():
            return SGD(
                _trainable(groups),
                lr=config.lr,
                momentum=config.momentum,
                nesterov=config.nesterov,
                weight_decay=config.weight_decay,
            )
        case _:
            raise TypeError(
                f"setup_optimizer: config={config!r} is no optim section: give a MuonConfig, "
                "AdamWConfig, SGDConfig or DionConfig of trainer.config (of a dict, "
                "MuonConfig.model_validate makes one)"
            )


def muon_options(config: MuonConfig) -> MuonOptions:
    """Return the settings that never enter the state."""
    return MuonOptions(
        impl=config.impl,
        kernel=config.kernel,
        ns_steps=config.ns_steps,
        ns_dtype=config.ns_dtype,
        ns_coefficients=config.ns_coefficients,
        replicate=config.replicate,
        max_stack_gib=config.max_stack_gib,
        split_gate_up=config.split_gate_up,
        stats_interval=config.stats_interval,
    )


def plan_groups(config: MuonConfig, specs: Iterable[ParameterSpec]) -> list[PlannedGroup]:
    """Return the param groups of described parameters, as `setup_optimizer` would make them.

    For `plan_with_kernels` and pricing without ranks.
    """
    by_group: dict[str, list[ParameterSpec]] = {name: [] for name in GROUP_NAMES}
    for spec in specs:
        by_group[group_of(spec.name, spec.shape)].append(spec)
    return [
        PlannedGroup(
            name,
            "adamw" if name == "adamw" else "muon",
            tuple(members),
            flatten=_is_flattened(name, config),
            adjust_lr=config.adjust_lr,
        )
        for name, members in by_group.items()
        if members
    ]


def group_settings(name: str, config: DionMuonSection) -> dict[str, object]:
    """Return the hyperparameters that a group of this name sets for itself."""
    if name == "adamw":
        lr = config.lr if config.adamw_lr is None else config.adamw_lr
        return {"algorithm": "adamw", "lr": lr, "flatten": config.flatten}
    return {"algorithm": "muon", "flatten": _is_flattened(name, config)}


def _is_flattened(name: str, config: DionMuonSection) -> bool:
    # A stack of experts is a batch whatever the setting, which is there for convolutions.
    return config.flatten and name != "experts"


def _setup_muon(config: MuonConfig, groups: list[NamedGroup]) -> Muon:
    return Muon(
        param_groups(groups, config),
        lr=config.lr,
        mu=config.mu,
        betas=(config.betas1, config.betas2),
        weight_decay=config.weight_decay,
        cautious_wd=config.cautious_wd,
        epsilon=config.epsilon,
        nesterov=config.nesterov,
        adjust_lr=config.adjust_lr,
        flatten=config.flatten,
        options=muon_options(config),
    )


def _setup_dion(config: DionConfig, groups: list[NamedGroup]) -> TrainerOptimizer:
    try:
        from trainer.optim.dion import DionMuon
    except ImportError as error:
        raise UserError(
            f"optim.type='dion': needs the package dion, and importing it failed ({error}); "
            "pip install 'trainer[dion]', or set optim.type='muon'"
        ) from error
    return DionMuon.from_config(config, param_groups(groups, config))


def param_groups(groups: list[NamedGroup], config: DionMuonSection) -> list[dict[str, object]]:
    """Return groups in torch's form, named, with the hyperparameters they set for themselves."""
    return [
        {
            "name": group.name,
            "params": list(group.named_parameters),
            **group_settings(group.name, config),
        }
        for group in groups
    ]


def _trainable(groups: list[NamedGroup]) -> list[tuple[str, Tensor]]:
    return [pair for group in groups for pair in group.named_parameters]
