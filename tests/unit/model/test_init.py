import pytest
import torch
from torch import nn

from tests.support.meshes import one_rank_mesh
from tests.support.networks import dense_architecture, moe_architecture, random_model
from trainer.model.init import draw_normal, init_random_
from trainer.model.setup import setup_model


def test_numbers_depend_on_seed_name_and_shape_alone() -> None:
    first = draw_normal(1, "a.weight", (3, 4))
    torch.manual_seed(99)
    assert torch.equal(first, draw_normal(1, "a.weight", (3, 4)))
    assert not torch.equal(first, draw_normal(2, "a.weight", (3, 4)))
    assert not torch.equal(first, draw_normal(1, "b.weight", (3, 4)))


def test_each_expert_has_its_own_numbers() -> None:
    module = nn.Module()
    module.stack = nn.Parameter(torch.empty(4, 3, 5))
    init_random_(module, seed=0, std=0.5)
    for expert in range(4):
        assert torch.equal(module.stack[expert], 0.5 * draw_normal(0, f"stack[{expert}]", (3, 5)))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_rules_by_kind_of_parameter(tied: bool) -> None:
    architecture = moe_architecture(tie_word_embeddings=tied, initializer_range=0.02)
    with one_rank_mesh() as mesh:
        model = setup_model(random_model(architecture), mesh, seed=5)
        weights = {name: p.full_tensor() for name, p in model.named_parameters()}
    assert ("lm_head.weight" in weights) is not tied
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    for name, weight in weights.items():
        if name.endswith("norm.weight"):
            assert torch.equal(weight, torch.ones_like(weight)), name
        else:
            assert weight.std().item() == pytest.approx(0.02, rel=0.25), name


def test_rotary_frequencies_are_those_of_transformers() -> None:
    with one_rank_mesh() as mesh:
        model = setup_model(random_model(dense_architecture(rope_theta=100.0)), mesh)
    expected = 1 / 100.0 ** (torch.arange(0, 8, 2) / 8)
    assert torch.allclose(model.model.rotary_emb.inv_freq, expected)
