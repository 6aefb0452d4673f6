"""A published model gives transformers' own logits, loss and raw gradients, packed or alone."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3ForCausalLM, Qwen3MoeForCausalLM

from tests.support.meshes import one_rank_mesh
from tests.support.networks import dense_architecture, moe_architecture, packed_batch
from trainer.config.model import DenseArchitecture, ModelConfig, MoEArchitecture
from trainer.model import setup_model
from trainer.model.architecture import inline_config
from trainer.model.export import save_hf_weights

DENSE = dense_architecture(initializer_range=0.2)


def moe(**changes: object) -> MoEArchitecture:
    return moe_architecture(initializer_range=0.2, **changes)


def rope(kind: str, **parameters: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0} | parameters}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}

# Architecture, and fields of config.json that `[model.architecture]` has not.
MODELS: dict[str, tuple[DenseArchitecture, dict[str, object]]] = {
    "every other layer sparse": (moe(decoder_sparse_step=2, num_hidden_layers=3), {}),
    "one layer dense": (moe(mlp_only_layers=(0,)), {}),
    "no layer sparse": (moe(decoder_sparse_step=3), {}),
    "probabilities as they are": (moe(norm_topk_prob=False), {}),
    "one expert a token": (moe(num_experts_per_tok=1, norm_topk_prob=False), {}),
    "all experts a token": (moe(num_experts_per_tok=4), {}),
    "a single expert": (moe(num_experts=1, num_experts_per_tok=1), {}),
    "wide heads, one key": (moe(head_dim=20, num_key_value_heads=1), {}),
    "as many keys as heads": (moe(num_key_value_heads=4, vocab_size=71), {}),
    "biases": (moe(), {"attention_bias": True}),
    "tied, padded": (moe(tie_word_embeddings=True), {"pad_token_id": 3}),
    "auxiliary loss asked of transformers": (moe(), {"output_router_logits": True}),
    "linear": (moe(), rope("linear")),
    "yarn": (DENSE, rope("yarn", original_max_position_embeddings=16)),
    "llama3": (DENSE, rope("llama3", **LLAMA3)),
    "dense": (DENSE, {"attention_bias": True, "hidden_act": "gelu"}),
}
LENGTHS = [[5, 1, 8, 10], [11, 13]]


def write_model(folder: Path, name: str) -> PreTrainedModel:
    """Save a random model of transformers and return it."""
    architecture, changes = MODELS[name]
    config = inline_config(architecture)
    for field, value in changes.items():
        setattr(config, field, value)
    kind = Qwen3MoeForCausalLM if isinstance(architecture, MoEArchitecture) else Qwen3ForCausalLM
    torch.manual_seed(0)
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases begin as ones and zeros
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    return kind.from_pretrained(folder, attn_implementation="eager").train()


def run_alone(
    model: PreTrainedModel, input_ids: Tensor, target_ids: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return logits, summed loss and gradients of transformers, each document by itself."""
    all_logits, loss = [], torch.zeros(())
    for ids, targets, lengths in zip(input_ids, target_ids, LENGTHS, strict=True):
        for document, wanted in zip(ids.split(lengths), targets.split(lengths), strict=True):
            logits = model(input_ids=document.unsqueeze(0), use_cache=False).logits[0]
            loss = loss + nn.functional.cross_entropy(logits, wanted, reduction="sum")
            all_logits.append(logits.detach())
    loss.backward()
    zero = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return torch.cat(all_logits), loss.detach(), zero | gradients


@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients(tmp_path: Path, name: str) -> None:
    reference = write_model(tmp_path / "theirs", name)
    input_ids, position_ids, target_ids = packed_batch(LENGTHS)
    logits, loss, gradients = run_alone(reference, input_ids, target_ids)
    for attention, is_recomputed in (("sdpa", False), ("eager", True)):
        config = ModelConfig(
            name=str(tmp_path / "theirs"),
            compute_dtype="float32",
            attention=attention,
            activation_checkpointing=is_recomputed,
            logits_chunk_tokens=7,
        )
        with one_rank_mesh() as mesh:
            model = setup_model(config, mesh)
            with torch.no_grad():
                ours = model(input_ids, position_ids=position_ids, logits=True)
            outputs = model(input_ids, position_ids=position_ids, target_ids=target_ids)
            (-outputs.log_probs_PS.sum()).backward()
            # fp32 sums in another order.
            torch.testing.assert_close(ours.flatten(0, 1), logits, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(-outputs.log_probs_PS.sum(), loss, rtol=1e-5, atol=0)
            assert {parameter for parameter, _ in model.named_parameters()} == gradients.keys()
            for parameter, value in model.named_parameters():
                difference = (value.grad.full_tensor() - gradients[parameter]).norm()
                bound = 1e-5 * gradients[parameter].norm() + 1e-5
                assert difference <= bound, (attention, parameter)


@pytest.mark.parametrize("name", MODELS)
def test_weights_and_config_survive_a_round_trip_bit_for_bit(tmp_path: Path, name: str) -> None:
    reference = write_model(tmp_path / "theirs", name)
    with one_rank_mesh() as mesh:
        config = ModelConfig(name=str(tmp_path / "theirs"), compute_dtype="float32")
        save_hf_weights(setup_model(config, mesh), None, tmp_path / "ours", "float32")
    again = type(reference).from_pretrained(tmp_path / "ours")
    theirs, ours = reference.state_dict(), again.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in theirs.items())
    assert reference.config.to_diff_dict() == again.config.to_diff_dict()
