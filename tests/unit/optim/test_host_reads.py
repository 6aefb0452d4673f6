"""No step reads a number back: the host would wait for the device in the midst of it."""

import pytest
import torch

from tests.support.host_reads import HostReads
from tests.support.meshes import one_rank_mesh
from trainer.config.optim import AdamWConfig, MuonConfig, SGDConfig
from trainer.optim import setup_optimizer
from trainer.parallel.clip import clip_gradients_

CONFIGS = {
    "muon": MuonConfig(lr=0.1, ns_dtype="float32"),
    "nesterov": MuonConfig(lr=0.1, ns_dtype="float32", nesterov=True, adjust_lr="spectral_norm"),
    "cautious": MuonConfig(lr=0.1, ns_dtype="float32", cautious_wd=True, weight_decay=0.1),
    "per_matrix": MuonConfig(lr=0.1, ns_dtype="float32", impl="per_matrix"),
    "bfloat16": MuonConfig(lr=0.1),
    "adamw": AdamWConfig(lr=0.1),
    "sgd": SGDConfig(lr=0.1),
}
SHAPES = {
    "model.embed_tokens.weight": (24, 16),
    "model.layers.0.self_attn.q_proj.weight": (16, 16),
    "model.layers.0.mlp.experts.gate_up_proj": (4, 32, 16),
    "model.layers.0.mlp.gate.weight": (4, 16),
    "model.norm.weight": (16,),
}


def draw() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parameters = {}
    for name, shape in SHAPES.items():
        parameters[name] = torch.nn.Parameter(torch.randn(shape, generator=generator))
        parameters[name].grad = torch.randn(shape, generator=generator)
    return parameters


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_step_reads_nothing_back(config) -> None:
    parameters = draw()
    before = [parameter.detach().clone() for parameter in parameters.values()]
    with one_rank_mesh() as mesh:
        optimizer = setup_optimizer(config, parameters.items(), mesh)
        for _ in range(2):
            with HostReads() as reads:
                norm = clip_gradients_(parameters.values(), 1.0)
                optimizer.step(finite=norm.finite)
            assert reads.names == []
            # This does: it asks for the last step's flag.
            assert optimizer.settle()
    assert not any(map(torch.equal, parameters.values(), before))


def test_reads_are_noticed() -> None:
    with HostReads() as reads:
        torch._foreach_add_([torch.zeros(())], torch.ones(()))
        float(torch.ones(()))
    assert len(reads.names) == 2
