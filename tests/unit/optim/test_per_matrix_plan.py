"""What is said of the reference's step: parameters are gathered, kernels go by shape."""

import torch

from tests.support.qwen3_moe import qwen3_30b_a3b
from trainer.config.optim import MuonConfig
from trainer.optim.options import MuonOptions, plan_with_kernels
from trainer.optim.setup import plan_groups
from trainer.optim.table import routing_table

CPU = torch.device("cpu")
EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


def plan(split_gate_up=False, **sizes):
    groups = plan_groups(MuonConfig(), qwen3_30b_a3b(0, num_layers=1, **sizes))
    options = MuonOptions(impl="per_matrix", split_gate_up=split_gate_up)
    made, kernels = plan_with_kernels(groups, options, CPU)
    assert kernels == []
    assert made.buckets == made.slots == ()
    return made


def route_of(made, name):
    return next(route for route in made.routes if route.parameter == name)


def test_sharded_parameters_are_gathered() -> None:
    made = plan(dp_shard=4, ep=2)
    assert route_of(made, EXPERTS).layout == "gathered over dp_shard_mod_ep x ep"
    assert route_of(made, "model.norm.weight").layout == "elementwise"
    query = route_of(made, "model.layers.0.self_attn.q_proj.weight")
    assert (query.layout, query.kernel) == ("gathered over dp_shard", "dense")
    # Four of attention and the router once each, two of experts over two axes.
    assert made.num_gathers == made.num_exchanges() == 5 + 2 * 2
    assert "gathered over dp_shard" in routing_table(made)


def test_one_rank_gathers_nothing() -> None:
    made = plan(dp_shard=1, ep=1)
    assert route_of(made, EXPERTS).layout == "whole"
    assert made.num_gathers == 0


def test_the_update_factor_is_that_of_what_is_orthogonalized() -> None:
    # 1536 x 2048 whole, 768 x 2048 each: the longer side decides.
    assert route_of(plan(), EXPERTS).lr_scale == route_of(plan(True), EXPERTS).lr_scale
    assert route_of(plan(), EXPERTS).lr_scale == 0.2 * 2048**0.5
