"""`plan.json` and wandb's config describe the step that runs."""

import json

import pytest
import torch

from trainer.loops.plan_file import describe_plan, kernel_choices
from trainer.optim import Muon, MuonOptions


def muon(impl) -> Muon:
    weights = [torch.nn.Parameter(torch.ones(4, 6)), torch.nn.Parameter(torch.ones(2, 6, 4))]
    return Muon(weights, options=MuonOptions(impl=impl))


@pytest.mark.parametrize("impl", ["stacked", "per_matrix"])
def test_a_plan_names_its_implementation_and_every_parameter(impl) -> None:
    described = json.loads(json.dumps(describe_plan(muon(impl))))
    assert described["impl"] == impl
    assert [route["shape"] for route in described["routes"]] == [[4, 6], [2, 6, 4]]
    assert {route["kernel"] for route in described["routes"]} == {"dense"}
    assert bool(described["buckets"]) == (impl == "stacked")


@pytest.mark.parametrize("impl", ["stacked", "per_matrix"])
def test_kernels_are_named_by_shape(impl) -> None:
    chosen = kernel_choices(muon(impl))
    assert chosen.keys() == {"4x6", "6x4"}
    assert all(kernel.startswith("dense (") for kernel in chosen.values())


def test_others_than_muon_are_named() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    assert describe_plan(optimizer) == {"optimizer": "SGD", "parameters_per_group": [1]}
    assert kernel_choices(optimizer) == {}
