"""How much device memory a training step takes, by counting: for `trainer plan`.

Owns the counts of the model's side; the optimizer's own temporaries come from
`trainer.optim.pricing`. Counts assume that routing is even: a rank whose experts get more than
their share of tokens needs more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import Qwen3MoeConfig

from trainer.cli.planning.parameters import gathered_numel, units
from trainer.model.architecture import QwenConfig
from trainer.model.flops import is_moe_layer
from trainer.optim.spec import ParameterSpec

GIB = 2**30
MASTER_BYTES = 4
"""Weights, gradients and reduced gradients are fp32."""
USABLE = 0.92
"""Part of a GPU's memory that tensors may take: the rest is CUDA's, NCCL's and fragmentation."""


@dataclass(frozen=True)
class Shape:
    """What a micro-batch is.

    Attributes:
        num_packs: Packs of a forward on one rank.
        seq_len: Tokens a pack.
        compute_bytes: Bytes of an element of the compute dtype.
        logits_chunk_tokens: Tokens whose logits exist at once.
        is_checkpointed: Whether layers are recomputed in the backward.
        keeps_gathered: Whether gathered weights stay until the backward.
    """

    num_packs: int
    seq_len: int
    compute_bytes: int
    logits_chunk_tokens: int
    is_checkpointed: bool
    keeps_gathered: bool

    @property
    def num_tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.num_packs * self.seq_len


@dataclass(frozen=True)
class StepMemory:
    """Bytes on one rank while a step runs.

    Attributes:
        weights, gradients, state: Held throughout (fp32).
        gathered: Weights gathered for computing, prefetched ones included.
        reduced: Unsharded gradients on their way to their shards.
        activations: Kept for the backward.
        logits: Of one chunk of tokens, with their gradient.
        dispatch: Rows on their way to experts and back.
        optimizer: Temporaries of the optimizer's step.
    """

    weights: int
    gradients: int
    state: int
    gathered: int
    reduced: int
    activations: int
    logits: int
    dispatch: int
    optimizer: int

    @property
    def held(self) -> int:
        """Bytes held between steps, gradients included."""
        return self.weights + self.gradients + self.state

    @property
    def model_peak(self) -> int:
        """The most during forward and backward."""
        passing = self.gathered + self.reduced + self.logits + self.dispatch
        return self.held + passing + self.activations

    @property
    def optimizer_peak(self) -> int:
        """The most during the optimizer's step."""
        return self.held + self.optimizer


def step_memory(
    hf_config: QwenConfig,
    specs: Sequence[ParameterSpec],
    shape: Shape,
    *,
    num_local: int,
    state_bytes: int,
    optimizer_bytes: int,
) -> StepMemory:
    """Count a step's memory on one rank.

    Args:
        hf_config: The network.
        specs: Its parameters on this rank.
        shape: The micro-batch.
        num_local: Elements of all parameters on this rank.
        state_bytes: Of the optimizer's state.
        optimizer_bytes: Of the optimizer's temporaries.
    """
    gathered, reduced = _gathered_and_reduced(specs, shape)
    return StepMemory(
        weights=num_local * MASTER_BYTES,
        gradients=num_local * MASTER_BYTES,
        state=state_bytes,
        gathered=gathered,
        reduced=reduced,
        activations=activation_bytes(hf_config, shape),
        logits=logits_bytes(hf_config, shape),
        dispatch=_dispatch_bytes(hf_config, shape),
        optimizer=optimizer_bytes,
    )


def _gathered_and_reduced(specs: Sequence[ParameterSpec], shape: Shape) -> tuple[int, int]:
    """Return bytes of gathered weights, and of unsharded gradients, at the worst moment."""
    sizes: dict[str, int] = {}
    for unit in units(list(specs)):
        layer = unit.name.removesuffix(" experts")
        sizes[layer] = sizes.get(layer, 0) + sum(gathered_numel(spec) for spec in unit.specs)
    ends = sizes.pop("embeddings and output")
    largest = max(sizes.values(), default=0)
    # One layer computes, the next is gathered meanwhile into a buffer that is then cut up.
    layers = sum(sizes.values()) if shape.keeps_gathered else 3 * largest
    # Gradients of a unit in the compute dtype, and their fp32 copy in the order of the reduction.
    reduced = max(largest, ends) * (shape.compute_bytes + MASTER_BYTES)
    return (ends + layers) * shape.compute_bytes, reduced


def activation_bytes(hf_config: QwenConfig, shape: Shape) -> int:
    """Return the bytes that autograd keeps for the backward of a micro-batch.

    With checkpointing: each layer's input, and everything of the one layer that is recomputed.
    """
    layers = [_layer_bytes(hf_config, layer, shape) for layer in range(hf_config.num_hidden_layers)]
    width = hf_config.hidden_size
    # The last norm, its output for the projection, one log-sum-exp a token.
    ends = _norm_bytes(width, shape) + width * shape.compute_bytes + MASTER_BYTES
    if shape.is_checkpointed:
        inputs = len(layers) * width * shape.compute_bytes
        return shape.num_tokens * (ends + inputs + max(layers))
    return shape.num_tokens * (ends + sum(layers))


def _layer_bytes(hf_config: QwenConfig, layer: int, shape: Shape) -> int:
    """Return what one layer keeps for each token."""
    width, size = hf_config.hidden_size, shape.compute_bytes
    head_dim, num_keys = hf_config.head_dim, hf_config.num_key_value_heads
    assert head_dim is not None, "transformers sets it when a config is made"
    assert num_keys is not None, "transformers sets it when a config is made"
    queries, keys = hf_config.num_attention_heads * head_dim, num_keys * head_dim
    norms = 2 * _norm_bytes(width, shape) + _norm_bytes(queries + keys, shape)
    # Rotary products keep nothing of their own; sdpa keeps query, key, value (repeated to all
    # heads), its output, and a log-sum-exp a head; the projection keeps the output laid out anew.
    attention = (5 * queries) * size + hf_config.num_attention_heads * MASTER_BYTES
    return norms + attention + _mlp_bytes(hf_config, layer, shape)


def _norm_bytes(width: int, shape: Shape) -> int:
    """Return what an RMS norm keeps: its input in fp32, its scale, its output before the weight."""
    copy = width * MASTER_BYTES if shape.compute_bytes != MASTER_BYTES else 0
    return copy + 2 * width * shape.compute_bytes + MASTER_BYTES


def _mlp_bytes(hf_config: QwenConfig, layer: int, shape: Shape) -> int:
    width, size = hf_config.hidden_size, shape.compute_bytes
    match hf_config:
        case Qwen3MoeConfig() if is_moe_layer(hf_config, layer):
            hidden, choices = hf_config.moe_intermediate_size, hf_config.num_experts_per_tok
            # The rows, gate and up together, the activated gate, the product, the results.
            rows = choices * (2 * width + 4 * hidden) * size
            return rows + 2 * hf_config.num_experts * MASTER_BYTES
        case _:
            hidden = hf_config.intermediate_size
            assert hidden is not None, "a dense layer has a width"
            return 4 * hidden * size


def logits_bytes(hf_config: QwenConfig, shape: Shape) -> int:
    """Return the bytes of one chunk's logits: as computed, in fp32, and their gradient."""
    rows = min(shape.logits_chunk_tokens, shape.num_tokens)
    return rows * hf_config.vocab_size * (2 * shape.compute_bytes + MASTER_BYTES)


def _dispatch_bytes(hf_config: QwenConfig, shape: Shape) -> int:
    """Return the bytes of rows sent, received and put in order, in one direction."""
    match hf_config:
        case Qwen3MoeConfig():
            row = hf_config.num_experts_per_tok * hf_config.hidden_size * shape.compute_bytes
            return 3 * shape.num_tokens * row
        case _:
            return 0


def largest_micro_batch(
    hf_config: QwenConfig, memory: StepMemory, shape: Shape, capacity: float
) -> int:
    """Return the most packs a micro-batch may have on a GPU of `capacity` bytes; 0: none.

    Args:
        hf_config: The network.
        memory: Of `shape`.
        shape: The micro-batch that was counted.
        capacity: Usable bytes.
    """
    if memory.optimizer_peak > capacity:
        return 0
    growing = (memory.activations + memory.dispatch) / shape.num_packs
    fixed = memory.model_peak - memory.activations - memory.dispatch
    return max(0, int((capacity - fixed) / growing))
