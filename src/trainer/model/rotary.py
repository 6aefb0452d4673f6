"""The rotary embedding of a network: transformers' own, and which of its kinds can be trained.

Owns the choice of class and the refusal. Who asks: `published.py` before anything is built,
`setup.py` for the buffers of a network that came from the meta device.
"""

from typing import Any, cast

from torch import nn
from transformers import Qwen3Config, Qwen3MoeConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

QwenConfig = Qwen3Config | Qwen3MoeConfig


def rotary_embedding(config: QwenConfig) -> nn.Module:
    """Return the module, its frequencies computed."""
    match config:
        case Qwen3MoeConfig():
            return Qwen3MoeRotaryEmbedding(config)
        case Qwen3Config():
            return Qwen3RotaryEmbedding(config)


def rope_parameters(config: QwenConfig) -> dict[str, Any]:
    """Return `rope_parameters`, which transformers fills from older names too."""
    return cast(dict[str, Any], config.rope_parameters)


def kind_problem(config: QwenConfig) -> str:
    """Say why this kind of embedding cannot be trained; empty if it can.

    Frequencies that follow the longest position of a batch would give a packed document other
    values than it has alone.
    """
    parameters = rope_parameters(config)
    if "rope_type" not in parameters:
        return f"rope_parameters={parameters}: all layers have one embedding, with one rope_type"
    kind = parameters["rope_type"]
    if kind not in {"default", *ROPE_INIT_FUNCTIONS}:
        return f"rope_type={kind!r}: transformers has no such embedding"
    if "dynamic" in kind or kind == "longrope":
        return (
            f"rope_type={kind!r}: its frequencies follow the longest document of a pack, which "
            "would change the others; 'default', 'linear', 'yarn' and 'llama3' do not"
        )
    return ""


def value_problem(config: QwenConfig) -> str:
    """Say why these parameters make no embedding; empty if they do."""
    parameters = rope_parameters(config)
    try:
        is_finite = bool(cast(Any, rotary_embedding(config)).inv_freq.isfinite().all())
    except (TypeError, ValueError, KeyError, ArithmeticError) as error:
        return f"rope_parameters={parameters}: they make no embedding ({error})"
    return "" if is_finite else f"rope_parameters={parameters}: its frequencies are not finite"
