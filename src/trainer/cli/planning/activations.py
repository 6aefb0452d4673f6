"""What autograd keeps of a micro-batch for the backward, by counting: for `trainer plan`.

Owns the count, tensor by tensor, of what transformers' layers, our experts and the log-probs save
on this project's paths; a test holds it against autograd itself. Eager execution is counted:
`model.compile` saves less. Counts assume that routing is even: a rank whose experts get more than
their share of tokens keeps more. What passes beside it is `memory.py`'s.
"""

from dataclasses import dataclass

from transformers import Qwen3MoeConfig

from trainer.model.architecture import QwenConfig
from trainer.model.attention import AttentionName
from trainer.model.flops import is_moe_layer

FP32_BYTES = 4
INT64_BYTES = 8


@dataclass(frozen=True)
class Shape:
    """What a micro-batch is, and how it is computed.

    Attributes:
        num_packs: Packs of a forward on one rank.
        seq_len: Tokens a pack.
        compute_bytes: Bytes of an element of the compute dtype.
        attention: The implementation.
        logits_chunk_tokens: Tokens whose logits exist at once.
        is_checkpointed: Whether layers are recomputed in the backward.
        keeps_gathered: Whether gathered weights stay until the backward.
        num_micro_batches: Of a step, on one rank.
        is_dispatched: Whether some experts are on other ranks.
    """

    num_packs: int
    seq_len: int
    compute_bytes: int
    attention: AttentionName
    logits_chunk_tokens: int
    is_checkpointed: bool
    keeps_gathered: bool
    num_micro_batches: int
    is_dispatched: bool

    @property
    def num_tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.num_packs * self.seq_len

    @property
    def num_chunks(self) -> int:
        """Chunks of tokens whose logits are computed one after another."""
        return -(-self.num_tokens // self.logits_chunk_tokens)


@dataclass(frozen=True)
class LayerActivations:
    """Bytes that one layer keeps for its backward: its MLP, and the rest (attention, norms)."""

    mlp: int
    rest: int


@dataclass(frozen=True)
class Activations:
    """Bytes kept of one micro-batch.

    Attributes:
        throughout: Kept until the backward ends: ids, cosines and sines, and the attention mask
            where layers are recomputed.
        head: Of the last norm and the log-probs.
        inputs: Each layer's input, kept where layers are recomputed; otherwise 0.
        layers: What each layer keeps, or has when it is recomputed.
    """

    throughout: int
    head: int
    inputs: int
    layers: tuple[LayerActivations, ...]

    @property
    def after_forward(self) -> int:
        """Bytes kept when the forward ends."""
        return self.head + self.before_layer(len(self.layers))

    def before_layer(self, layer: int) -> int:
        """Return the bytes that exist when the backward of a layer is done, or has not begun."""
        if self.inputs:
            return self.throughout + layer * self.inputs
        return self.throughout + sum(kept.mlp + kept.rest for kept in self.layers[:layer])


def count_activations(hf_config: QwenConfig, shape: Shape) -> Activations:
    """Count what is kept for the backward of a micro-batch."""
    layers = range(hf_config.num_hidden_layers)
    return Activations(
        throughout=shape.num_tokens * _throughout_bytes(hf_config, shape),
        head=shape.num_tokens * _head_bytes(hf_config, shape),
        inputs=shape.num_tokens * _input_bytes(hf_config, shape) if shape.is_checkpointed else 0,
        layers=tuple(
            LayerActivations(
                mlp=shape.num_tokens * _mlp_bytes(hf_config, layer, shape),
                rest=shape.num_tokens * _rest_bytes(hf_config, shape),
            )
            for layer in layers
        ),
    )


def _throughout_bytes(hf_config: QwenConfig, shape: Shape) -> int:
    """Return what is kept for each token by all layers together."""
    head_dim = hf_config.head_dim
    assert head_dim is not None, "transformers sets it when a config is made"
    # Recomputation keeps the mask; otherwise the layers keep what they make of it.
    mask = _mask_bytes(shape) if shape.is_checkpointed else 0
    return 2 * head_dim * shape.compute_bytes + 2 * INT64_BYTES + mask


def _mask_bytes(shape: Shape) -> int:
    match shape.attention:
        case "eager":
            return shape.seq_len * shape.compute_bytes
        case "sdpa":
            return shape.seq_len
        case "flex_attention":
            return 0


def _head_bytes(hf_config: QwenConfig, shape: Shape) -> int:
    """Return what the last norm and the log-probs keep for each token."""
    width = hf_config.hidden_size
    # The log-probs keep their input, which rows have a target, and a log-sum-exp.
    log_probs = width * shape.compute_bytes + INT64_BYTES + FP32_BYTES
    return _norm_bytes(width, 1, shape) + log_probs


def _input_bytes(hf_config: QwenConfig, shape: Shape) -> int:
    """Return what recomputation keeps of a layer for each token.

    Its input; of experts the choices and their order with its inverse, which nodes of the graph
    hold on to.
    """
    kept = hf_config.hidden_size * shape.compute_bytes
    match hf_config:
        case Qwen3MoeConfig():
            return kept + 3 * hf_config.num_experts_per_tok * INT64_BYTES
        case _:
            return kept


def _rest_bytes(hf_config: QwenConfig, shape: Shape) -> int:
    """Return what one layer keeps for each token apart from its MLP."""
    width = hf_config.hidden_size
    # Both norms, and each one's output, which the projections behind it keep.
    norms = 2 * (_norm_bytes(width, 1, shape) + width * shape.compute_bytes)
    return norms + _attention_bytes(hf_config, shape)


def _norm_bytes(width: int, num_norms: int, shape: Shape) -> int:
    """Return what RMS norms keep: input in fp32, scales, output before the weight."""
    return width * (FP32_BYTES + shape.compute_bytes) + num_norms * FP32_BYTES


def _attention_bytes(hf_config: QwenConfig, shape: Shape) -> int:
    head_dim, num_keys = hf_config.head_dim, hf_config.num_key_value_heads
    assert head_dim is not None, "transformers sets it when a config is made"
    assert num_keys is not None, "transformers sets it when a config is made"
    size, num_heads = shape.compute_bytes, hf_config.num_attention_heads
    queries, keys = num_heads * head_dim, num_keys * head_dim
    norms = _norm_bytes(queries + keys, num_heads + num_keys, shape)
    # Rotary products keep nothing of their own. Keys and values repeated to all heads, and the
    # output, are kept beside the queries.
    repeated = 4 * queries * size
    match shape.attention:
        case "flex_attention":
            # It takes keys and values as they are where heads are a power of two.
            is_grouped = num_heads & (num_heads - 1) == 0
            kept = 2 * (queries + keys) * size if is_grouped else repeated
            return norms + kept + num_heads * FP32_BYTES
        case "sdpa":
            # The mask becomes a bias anew in each layer.
            return norms + repeated + num_heads * FP32_BYTES + shape.seq_len * size
        case "eager":
            # The softmax in fp32, and its copy in the compute dtype.
            scores = FP32_BYTES + (size if size != FP32_BYTES else 0)
            return norms + repeated + num_heads * shape.seq_len * scores


def _mlp_bytes(hf_config: QwenConfig, layer: int, shape: Shape) -> int:
    size = shape.compute_bytes
    match hf_config:
        case Qwen3MoeConfig() if is_moe_layer(hf_config, layer):
            hidden, choices = hf_config.moe_intermediate_size, hf_config.num_experts_per_tok
            # The rows, gate and up together, their product, the results; weights, and choices
            # with the order of rows and its inverse; probabilities.
            rows = choices * (2 * hf_config.hidden_size + 3 * hidden) * size
            routing = choices * (FP32_BYTES + size + 3 * INT64_BYTES) + FP32_BYTES
            return rows + routing + hf_config.num_experts * FP32_BYTES
        case _:
            hidden = hf_config.intermediate_size
            assert hidden is not None, "a dense layer has a width"
            # The gate, its activation, up, their product.
            return 4 * hidden * size
