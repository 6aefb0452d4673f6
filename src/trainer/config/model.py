"""The `model` section: which network, from where its weights, and how it computes."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from trainer.config.base import (
    Bool,
    Count,
    CountOrZero,
    NonNegativeFloat,
    PathText,
    PositiveFloat,
    Section,
)


class DenseArchitecture(Section):
    """A dense Qwen3; fields are those of transformers' `Qwen3Config`."""

    type: Literal["qwen3"] = "qwen3"
    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count
    max_position_embeddings: Count = 32768
    """Written into `config.json`; positions here restart with every document."""
    rope_theta: PositiveFloat = 1_000_000.0
    rms_norm_eps: PositiveFloat = 1e-6
    tie_word_embeddings: Bool = False
    initializer_range: PositiveFloat = 0.02

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is no multiple of "
                f"num_key_value_heads={self.num_key_value_heads}: every key-value head serves "
                "equally many heads; choose a divisor"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} is odd: rotary embeddings turn pairs of dims; choose "
                "an even one"
            )
        return self


class MoEArchitecture(DenseArchitecture):
    """A Qwen3 mixture of experts; fields are those of transformers' `Qwen3MoeConfig`."""

    type: Literal["qwen3_moe"] = "qwen3_moe"
    num_experts: Count
    num_experts_per_tok: Count
    moe_intermediate_size: Count
    norm_topk_prob: Bool = True
    decoder_sparse_step: Count = 1
    mlp_only_layers: tuple[CountOrZero, ...] = ()

    @model_validator(mode="after")
    def _top_k_fits(self) -> Self:
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} exceeds num_experts="
                f"{self.num_experts}: a token cannot visit more experts than there are; lower it"
            )
        return self

    @model_validator(mode="after")
    def _dense_layers_exist(self) -> Self:
        if max(self.mlp_only_layers, default=-1) >= self.num_hidden_layers:
            raise ValueError(
                f"mlp_only_layers={list(self.mlp_only_layers)} with num_hidden_layers="
                f"{self.num_hidden_layers}: layers are counted from 0 to "
                f"{self.num_hidden_layers - 1}; remove those that are not there"
            )
        return self


Architecture = Annotated[DenseArchitecture | MoEArchitecture, Field(discriminator="type")]


class ModelConfig(Section):
    """The network.

    `name` is a local folder or a hub name in Hugging Face layout, or a checkpoint of a run
    (`outputs/run/checkpoints/step_100`: its weights, nothing else of its state); `architecture`
    gives the shapes inline. With both, weights come from `name` and the shapes must agree. With
    `weights = "random"` nothing but shapes (and the tokenizer) is read.
    """

    name: PathText | None = None
    architecture: Architecture | None = None
    weights: Literal["pretrained", "random"] = "pretrained"
    """random: a function of seed, parameter name and index, the same on any split."""
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of forward and backward; weights, gradients and optimizer state are float32."""
    attention: Literal["auto", "eager", "sdpa", "flex_attention"] = "auto"
    """auto: flex_attention on a GPU (memory linear in seq_len), sdpa with a dense mask on a CPU."""
    experts: Literal["auto", "grouped_mm", "loop"] = "auto"
    """How experts multiply; auto: grouped_mm where dtype and shapes allow it."""
    activation_checkpointing: Bool = False
    """Compute each layer again in the backward instead of keeping its activations."""
    compile: Bool = False
    """torch.compile for attention, norms and dense MLPs."""
    load_balancing_coef: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss (Switch Transformer's, per packed sequence)."""
    logits_chunk_tokens: Count = 4096
    """Tokens whose logits exist at once, in the loss, log-probs and validation."""

    @model_validator(mode="after")
    def _has_a_source(self) -> Self:
        if self.name is None and self.architecture is None:
            raise ValueError(
                "neither name nor architecture is given: set model.name to a folder or hub name, "
                "or give [model.architecture] with model.weights = 'random'"
            )
        if self.name is None and self.weights == "pretrained":
            raise ValueError(
                "weights='pretrained' needs a source: set model.name to a folder or hub name, "
                "or model.weights = 'random'"
            )
        return self
