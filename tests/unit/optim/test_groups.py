import pytest
import torch
from torch import nn

from trainer.errors import UserError
from trainer.optim.groups import NamedGroup, check_cover, group_of, parse_groups, sort_parameters


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


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(UserError, match="no parameter requires a gradient"):
        sort_parameters([("w", torch.ones(2, 2))])
    with pytest.raises(UserError, match="got no parameters"):
        parse_groups([])


def test_all_of_torchs_forms_of_params_are_read() -> None:
    a, b = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    assert [n for n, _ in parse_groups([a, b])[0].named_parameters] == ["parameter0", "parameter1"]
    (first, second) = parse_groups(
        [{"params": [("a", a)], "name": "x"}, {"params": b, "algorithm": "adamw"}]
    )
    assert (first.name, second.name) == ("x", "group1")
    assert second.as_param_group() == {"params": [b], "algorithm": "adamw"}
