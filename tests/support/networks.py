"""Tiny architectures for tests, and inputs that fit them."""

import torch
from torch import Tensor

from trainer.config.model import DenseArchitecture, ModelConfig, MoEArchitecture

VOCAB_SIZE = 64


def dense_architecture(**changes: object) -> DenseArchitecture:
    """Return a dense Qwen3 of two layers."""
    return DenseArchitecture.model_validate(_sizes() | changes)


def moe_architecture(**changes: object) -> MoEArchitecture:
    """Return a Qwen3 mixture of two layers, four experts, two a token."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return MoEArchitecture.model_validate(_sizes() | sizes | changes)


def random_model(
    architecture: DenseArchitecture | MoEArchitecture, **changes: object
) -> ModelConfig:
    """Return a `model` section with random weights in fp32."""
    fields = {"architecture": architecture, "weights": "random", "compute_dtype": "float32"}
    return ModelConfig.model_validate(fields | changes)


def packed_batch(lengths: list[list[int]], *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return `input_ids`, `position_ids`, `target_ids`, `[P, S]`, for documents of these lengths.

    Each document predicts its own next token; its last position predicts nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), sum(lengths[0]))
    input_ids = torch.randint(0, VOCAB_SIZE, shape, generator=generator)
    position_ids = torch.stack([torch.cat([torch.arange(n) for n in pack]) for pack in lengths])
    target_ids = input_ids.roll(-1, 1)
    is_last = torch.nn.functional.pad(position_ids[:, 1:] == 0, (0, 1), value=True)
    return input_ids, position_ids, target_ids.masked_fill(is_last, -100)


def _sizes() -> dict[str, object]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.1,
    }
