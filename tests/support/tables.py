"""Tables of tiny runs: the network that tests of RL and pretraining share, and their changes."""

from typing import Any

TINY_MOE: dict[str, Any] = {
    "type": "qwen3_moe",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def tiny_model(**architecture: Any) -> dict[str, Any]:
    """Return a model section of random weights in float32; arguments change its shapes."""
    return {
        "weights": "random",
        "compute_dtype": "float32",
        "load_balancing_coef": 0.01,
        "architecture": TINY_MOE | architecture,
    }


def changed(table: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a table with changes: a section's keys are merged, unless it gets another `type`."""
    merged = dict(table)
    for name, value in changes.items():
        merges = isinstance(value, dict) and "type" not in value and name in table
        merged[name] = table[name] | value if merges else value
    return merged
