import pytest
import torch
from torch import nn

from trainer.errors import UserError
from trainer.optim.groups import (
    NamedGroup,
    check_cover,
    group_of,
    list_pairs,
    parse_groups,
    sort_parameters,
)


@pytest.mark.parametrize(
    ("name", "shape", "group"),
    [
        ("model.embed_tokens.weight", (10, 4), "adamw"),
        ("lm_head.weight", (10, 4), "adamw"),
        ("model.norm.weight", (4,), "adamw"),
        ("model.layers.0.self_attn.q_norm.weight", (4,), "adamw"),
        ("model.layers.0.self_attn.q_proj.bias", (4,), "adamw"),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (3, 4), "adamw"),
        ("model.layers.0.self_attn.q_proj.weight", (8, 4), "dense"),
        ("model.layers.0.mlp.gate_proj.weight", (8, 4), "dense"),
        ("model.layers.0.mlp.gate.weight", (3, 4), "router"),
        ("model.layers.0.mlp.experts.gate_up_proj", (3, 8, 4), "experts"),
        ("model.layers.0.mlp.experts.down_proj", (3, 4, 4), "experts"),
        ("mixer.conv1d.weight", (8, 1, 4), "adamw"),
        ("encoder.conv.weight", (8, 4, 3), "adamw"),
        ("depthwise.weight", (8, 1, 3, 3), "adamw"),
        ("patch_projection.weight", (8, 3, 4, 4), "dense"),
        # Names of other trainers.
        ("tok_embeddings.weight", (10, 4), "adamw"),
        ("transformer.wte.weight", (10, 4), "adamw"),
        ("token_emb.weight", (10, 4), "adamw"),
        ("output.weight", (10, 4), "adamw"),
        ("_orig_mod.output.weight", (10, 4), "adamw"),
        ("head.weight", (10, 4), "adamw"),
        ("encoder.layer.0.output.dense.weight", (8, 4), "dense"),
        ("layers.0.attention.output.weight", (8, 4), "dense"),
        ("layers.0.moe.router.gate.weight", (3, 4), "router"),
        ("layers.0.moe.experts.w1", (3, 8, 4), "experts"),
        ("layers.0.moe.shared_experts.w1.weight", (8, 4), "dense"),
    ],
)
def test_parameters_go_where_their_name_and_shape_say(name, shape, group) -> None:
    assert group_of(name, shape) == group


def test_frozen_parameters_are_in_no_group_and_tied_ones_in_one() -> None:
    model = nn.ModuleDict({"embed_tokens": nn.Embedding(6, 4), "a": nn.Linear(4, 4, bias=False)})
    model["lm_head"] = nn.Linear(4, 6, bias=False)
    model["lm_head"].weight = model["embed_tokens"].weight
    model["frozen"] = nn.Linear(4, 4, bias=False).requires_grad_(False)
    named = list(model.named_parameters(remove_duplicate=False))
    groups = sort_parameters(named)
    check_cover(groups, named)
    found = {g.name: [name for name, _ in g.named_parameters] for g in groups}
    assert found == {"dense": ["a.weight"], "adamw": ["embed_tokens.weight"]}


def test_a_parameter_in_two_groups_or_none_is_an_error() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    group = NamedGroup("dense", (("w", weight),))
    with pytest.raises(UserError, match=r"parameter w is in 2 param groups \(dense, dense\)"):
        check_cover([group, group], [("w", weight)])
    with pytest.raises(UserError, match="trainable parameter w is in 0"):
        check_cover([], [("w", weight)])
    weight.requires_grad_(False)
    with pytest.raises(UserError, match="frozen parameter w is in 1"):
        check_cover([group], [("w", weight)])


@pytest.mark.parametrize(
    "give", [lambda named: named.values(), lambda named: named, lambda named: [*named.items(), "w"]]
)
def test_what_is_no_pair_of_name_and_parameter_is_refused(give) -> None:
    named = {"w": torch.nn.Parameter(torch.zeros(2, 2))}
    with pytest.raises(TypeError, match=r"not \(name, parameter\) pairs: give model.named_param"):
        list_pairs(give(named))
    assert list_pairs(named.items()) == [("w", named["w"])]


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(UserError, match="no parameter requires a gradient"):
        sort_parameters([("w", torch.ones(2, 2))])
    with pytest.raises(UserError, match="got no parameters"):
        parse_groups([])


@pytest.mark.parametrize(
    ("give", "message"),
    [
        (lambda a, b: {a, b}, "params is a set, whose order differs"),
        (lambda a, b: [{"params": {a, b}}], "group group0 is a set, whose order differs"),
        (lambda a, b: a, "params is a Parameter: give parameters"),
        (lambda a, b: nn.Linear(2, 2), "params is a Linear: give parameters"),
        (lambda a, b: [{"lr": 0.1}], "param group group0 has no 'params'"),
        (lambda a, b: [{"params": [a]}, b], "params mixes groups with a Parameter"),
        (lambda a, b: ["a"], "group0 has a str where a parameter belongs"),
        (lambda a, b: [("x", a), ("y", a)], "parameter y of param group group0 is x once more"),
        (lambda a, b: [{"params": [a]}, {"params": [a]}], "parameter1 of param group group1 is"),
        (lambda a, b: [{"params": []}], "got no parameters"),
    ],
    ids=[
        "set", "set in a group", "tensor", "module", "no params", "mixed", "names", "twice",
        "in two groups", "empty groups",
    ],
)  # fmt: skip
def test_what_is_no_list_of_parameters_is_refused(give, message) -> None:
    a, b = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    with pytest.raises(UserError, match=message):
        parse_groups(give(a, b))


def test_all_of_torchs_forms_of_params_are_read() -> None:
    a, b = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    assert [n for n, _ in parse_groups([a, b])[0].named_parameters] == ["parameter0", "parameter1"]
    (first, second) = parse_groups(
        [{"params": [("a", a)], "name": "x"}, {"params": b, "algorithm": "adamw"}]
    )
    assert (first.name, second.name) == ("x", "group1")
    assert second.as_param_group() == {"params": [b], "algorithm": "adamw"}
