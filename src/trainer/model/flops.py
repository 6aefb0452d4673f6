"""Model FLOPs of a training step, by counting matrix products; recomputation does not count."""

from transformers import PretrainedConfig, Qwen3MoeConfig


def training_flops(config: PretrainedConfig, num_tokens: int, num_pairs: int) -> float:
    """Return the FLOPs of forward and backward over all ranks.

    Args:
        config: Of the model (Qwen3 or Qwen3-MoE).
        num_tokens: Tokens of the step, padding excluded.
        num_pairs: Causal (query, key) pairs inside documents.

    Source: 6 FLOPs a token and active weight, 12 a pair and attention channel (PaLM,
        arXiv 2204.02311, appendix B, with the causal half counted exactly).
    """
    attention = 12.0 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return 6.0 * active_matrix_weights(config) * num_tokens + attention * num_pairs


def active_matrix_weights(config: PretrainedConfig) -> int:
    """Return the matrix weights that one token meets: attention, its experts, router, lm_head."""
    width = config.hidden_size
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    attention = heads * config.head_dim * width
    mlps = sum(_mlp_weights(config, layer) for layer in range(config.num_hidden_layers))
    return config.num_hidden_layers * attention + mlps + config.vocab_size * width


def _mlp_weights(config: PretrainedConfig, layer: int) -> int:
    width = config.hidden_size
    match config:
        case Qwen3MoeConfig() if is_moe_layer(config, layer):
            experts = 3 * config.num_experts_per_tok * config.moe_intermediate_size * width
            return experts + config.num_experts * width
        case _:
            return 3 * config.intermediate_size * width


def is_moe_layer(config: Qwen3MoeConfig, layer: int) -> bool:
    """Return whether a layer has experts, by transformers' own rule."""
    return (
        layer not in (config.mlp_only_layers or [])
        and config.num_experts > 0
        and (layer + 1) % config.decoder_sparse_step == 0
    )
