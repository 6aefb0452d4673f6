"""The Python calls of the design, from a script that has started nothing itself."""

import pytest

from tests.support.launch import launch_ranks

SCRIPT = """
import torch
from trainer.config.model import ModelConfig, MoEArchitecture
from trainer.config.optim import MuonConfig
from trainer.config.parallel import ParallelConfig
from trainer.model import setup_model
from trainer.optim import Muon, setup_optimizer
from trainer.parallel import build_mesh

mesh = build_mesh(ParallelConfig(ep={ep}), "cpu")
architecture = MoEArchitecture(
    vocab_size=64, hidden_size=16, intermediate_size=16, moe_intermediate_size=8,
    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    num_experts=4, num_experts_per_tok=2,
)
config = ModelConfig(architecture=architecture, weights="random", compute_dtype="float32")
model = setup_model(config, mesh)
optimizer = setup_optimizer(MuonConfig(ns_dtype="float32"), model.named_parameters(), mesh)
assert isinstance(optimizer, Muon)
ids = torch.arange(32).view(1, 32)
for _ in range(3):
    outputs = model(ids, position_ids=ids, target_ids=ids.roll(-1, 1))
    loss = -outputs.log_probs_PS.mean() / mesh.size()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"{{loss.item() * mesh.size():.5f}}")
torch.distributed.destroy_process_group()
"""


@pytest.mark.distributed
def test_the_same_losses_on_one_rank_and_on_two():
    (alone,) = launch_ranks(1, SCRIPT.format(ep=1))
    both = launch_ranks(2, SCRIPT.format(ep=2))
    assert [ended.status for ended in (alone, *both)] == [0, 0, 0], both[0].err
    assert len(set(alone.out.split())) == 3
    assert [ended.out for ended in both] == [alone.out] * 2
