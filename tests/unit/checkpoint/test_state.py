import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.support.networks import moe_architecture, random_model
from trainer.checkpoint.manifest import OptimizerRecord
from trainer.checkpoint.state import (
    all_shards,
    apply_optimizer,
    model_tensors,
    record_optimizer,
    view_optimizer,
)
from trainer.config.optim import MuonConfig
from trainer.model import setup_model
from trainer.optim import setup_optimizer


@pytest.fixture
def run(mesh: DeviceMesh):
    model = setup_model(random_model(moe_architecture(tie_word_embeddings=True)), mesh)
    config = MuonConfig(lr=0.25, adamw_lr=0.5, ns_dtype="float32")
    return model, setup_optimizer(config, model.named_parameters(), mesh)


def test_tied_tensors_are_held_once_and_persistent_buffers_are_held():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].weight = model[0].weight
    model.register_buffer("scratch", torch.zeros(1), persistent=False)
    names = set(model_tensors(model))
    assert {"0.weight", "1.bias", "2.running_mean"} <= names
    assert "1.weight" not in names
    assert "scratch" not in names


def test_state_is_found_by_parameter_name_in_dions_layout(run):
    model, optimizer = run
    view = view_optimizer(model, optimizer)
    assert set(view.state["model.layers.0.mlp.experts.gate_up_proj"]) == {"momentum"}
    assert set(view.state["model.norm.weight"]) == {"momentum", "variance", "step_dev"}
    assert set(view.names) == {name for name, _ in model.named_parameters()}


def test_keys_are_those_that_dcp_gives_a_model_and_an_optimizer(run):
    model, optimizer = run
    shards = all_shards(model, view_optimizer(model, optimizer), {"torch": torch.ones(3)}, rank=2)
    assert "model.model.norm.weight" in shards
    assert "optimizer.state.model.norm.weight.step_dev" in shards
    assert "rng.2.torch" in shards
    name = "model.layers.0.mlp.gate.weight"
    assert shards[f"optimizer.state.{name}.momentum"].shape == model.get_parameter(name).shape


def test_groups_are_recorded_with_names_and_plain_settings(run):
    model, optimizer = run
    record = record_optimizer(optimizer, view_optimizer(model, optimizer))
    assert record.type == "Muon"
    assert [group["settings"]["algorithm"] for group in record.groups] == ["muon"] * 3 + ["adamw"]
    assert [group["settings"]["lr"] for group in record.groups] == [0.25] * 3 + [0.5]
    assert "params" not in record.groups[0]["settings"]


def test_only_step_counts_come_from_the_record(run):
    model, optimizer = run
    view = view_optimizer(model, optimizer)
    groups = [
        {"names": group["names"], "settings": {"step": 7, "lr": 9.0}} for group in view.groups
    ]
    apply_optimizer(optimizer, view, OptimizerRecord("Muon", groups[::-1]))
    assert {group["step"] for group in optimizer.param_groups} == {7}
    assert [group["lr"] for group in optimizer.param_groups] == [0.25] * 3 + [0.5]


def test_parameter_of_another_model_is_refused(run, mesh: DeviceMesh):
    _, optimizer = run
    other = setup_model(random_model(moe_architecture()), mesh)
    with pytest.raises(RuntimeError, match="parameters that are not the model's"):
        view_optimizer(other, optimizer)


def test_state_outside_tensors_is_refused():
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer.state[layer.weight]["calls"] = 3
    with pytest.raises(RuntimeError, match=r"optimizer state \['calls'\] is not held in tensors"):
        view_optimizer(layer, optimizer)
