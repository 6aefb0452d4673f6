import logging
import sys

import pytest
import torch
from torch import nn

from trainer.config.optim import AdamWConfig, DionConfig, MuonConfig, SGDConfig
from trainer.errors import UserError
from trainer.optim import Muon, setup_optimizer
from trainer.optim.setup import plan_groups
from trainer.optim.spec import describe_parameters
from trainer.optim.torch_optimizers import SGD, AdamW


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(8, 4)
        self.q_proj = nn.Linear(4, 6)
        self.experts = nn.ParameterDict({"gate_up_proj": torch.randn(2, 6, 4)})
        self.mlp = nn.ModuleDict({"gate": nn.Linear(4, 2, bias=False)})


def build(config):
    return setup_optimizer(config, Model().named_parameters())


@pytest.mark.parametrize(
    ("config", "kind"),
    [(MuonConfig(), Muon), (AdamWConfig(), AdamW), (SGDConfig(), SGD)],
    ids=["muon", "adamw", "sgd"],
)
def test_each_type_builds_its_optimizer(config, kind) -> None:
    optimizer = build(config)
    assert type(optimizer) is kind
    assert optimizer.param_groups[0]["lr"] == config.lr
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 5


@pytest.mark.parametrize("config", [{"type": "muon"}, MuonConfig, None, "muon"], ids=str)
def test_what_is_no_section_is_refused(config) -> None:
    with pytest.raises(TypeError, match=r"config=.* is no optim section: give a MuonConfig"):
        build(config)


def test_muon_groups_come_in_order_and_are_logged(caplog) -> None:
    with caplog.at_level(logging.INFO):
        optimizer = build(MuonConfig(lr=0.1, adamw_lr=0.01))
    algorithms = [(group["algorithm"], group["lr"]) for group in optimizer.param_groups]
    assert algorithms == [("muon", 0.1)] * 3 + [("adamw", 0.01)]
    assert [route.group for route in optimizer.plan.routes] == [
        "dense", "experts", "router", "adamw", "adamw",
    ]  # fmt: skip
    assert "experts.gate_up_proj" in caplog.text


@pytest.mark.parametrize(
    ("field", "value", "changed"),
    [
        ("impl", "per_matrix", lambda o: o._options.impl),
        ("ns_steps", 3, lambda o: o._options.ns_steps),
        ("ns_dtype", "float16", lambda o: o.plan.options.ns_dtype),
        ("ns_coefficients", "keller_jordan", lambda o: o._options.ns_coefficients),
        ("kernel", "gram", lambda o: o.plan.buckets[0].kernel),
        ("replicate", "repeat", lambda o: o.plan.options.replicate),
        ("max_stack_gib", 0.5, lambda o: o.plan.options.max_stack_gib),
        ("split_gate_up", True, lambda o: o.plan.options.split_gate_up),
        ("stats_interval", 4, lambda o: o._options.stats_interval),
        ("nesterov", True, lambda o: o.param_groups[0]["nesterov"]),
        ("cautious_wd", True, lambda o: o.param_groups[0]["cautious_wd"]),
        ("adjust_lr", None, lambda o: o.param_groups[0]["adjust_lr"]),
        ("mu", 0.5, lambda o: o.param_groups[0]["mu"]),
        ("betas1", 0.5, lambda o: o.param_groups[3]["beta1"]),
        ("betas2", 0.5, lambda o: o.param_groups[3]["beta2"]),
        ("epsilon", 0.5, lambda o: o.param_groups[3]["epsilon"]),
        ("weight_decay", 0.5, lambda o: o.param_groups[3]["weight_decay"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_setting_reaches_the_optimizer(field, value, changed) -> None:
    assert changed(build(MuonConfig(**{field: value}))) == value


def test_a_plan_without_tensors_has_the_groups_of_the_optimizer() -> None:
    optimizer = build(MuonConfig())
    specs, _ = describe_parameters(Model().named_parameters())
    planned = plan_groups(MuonConfig(), specs)
    assert [(group.name, len(group.parameters)) for group in planned] == [
        ("dense", 1), ("experts", 1), ("router", 1), ("adamw", 2),
    ]  # fmt: skip
    assert len(optimizer.param_groups) == len(planned)


def test_dion_is_asked_for_by_name_and_missing(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "dion", None)
    monkeypatch.delitem(sys.modules, "trainer.optim.dion", raising=False)
    with pytest.raises(
        UserError, match=r"optim\.type='dion': needs the package dion.*trainer\[dion\]"
    ):
        build(DionConfig())
