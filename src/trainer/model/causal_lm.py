"""transformers' Qwen3 networks with our experts and our forward: log-probs, never full logits.

Owns what happens between token ids and `TokenOutputs`. Layers, attention, norms and `generate` are
transformers'. Does not own sharding (`setup.py`). Read next: `moe.py`, `attention.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import LongTensor, Tensor, nn
from transformers import (
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from trainer.model.attention import AttentionName, packed_mask
from trainer.model.load_balancing import RoutingRecord, summarize_routing
from trainer.model.log_probs import token_log_probs
from trainer.model.moe import MoEBlock, record_routing
from trainer.model.outputs import TokenOutputs


@dataclass(frozen=True)
class Computation:
    """How a network computes, resolved for this machine.

    Attributes:
        attention: Implementation of transformers.
        experts: Implementation of the grouped matrix product.
        logits_chunk_tokens: Tokens whose logits exist at once.
    """

    attention: AttentionName
    experts: Literal["grouped_mm", "loop"]
    logits_chunk_tokens: int


class TokenScoring(PreTrainedModel):
    """The forward of both networks, put before transformers' own in the order of base classes."""

    def forward(
        self,
        input_ids: LongTensor | None = None,
        position_ids: LongTensor | None = None,
        target_ids: Tensor | None = None,
        token_mask: Tensor | None = None,
        *,
        target_rows: Tensor | None = None,
        temperature: float = 1.0,
        with_entropy: bool = False,
        logits: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Score targets as `forward_tokens` does; without them, run transformers' forward.

        Raises:
            TypeError: targets or logits are asked for without ids and positions.

        Collective: as `forward_tokens`.
        """
        model = cast(CausalLM, self)
        if target_ids is None and not logits:
            with attention_for_decoding(model):
                return super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)
        if input_ids is None or position_ids is None:
            raise TypeError(
                "a call with target_ids or logits=True needs input_ids and position_ids: documents "
                "of a pack are told apart by where positions restart; of one document a row they "
                "are torch.arange(input_ids.shape[1]).expand_as(input_ids)"
            )
        assert not kwargs, f"not known with targets or logits: {sorted(kwargs)}"
        return forward_tokens(
            model,
            input_ids,
            position_ids,
            target_ids,
            token_mask,
            target_rows,
            temperature,
            with_entropy,
        )


class DenseCausalLM(TokenScoring, Qwen3ForCausalLM):
    """A dense Qwen3; see `forward_tokens` for what a call does."""

    def __init__(self, config: Qwen3Config, computation: Computation) -> None:
        _choose(config, computation)
        super().__init__(config)
        self.computation = computation


class MoECausalLM(TokenScoring, Qwen3MoeForCausalLM):
    """A Qwen3 mixture of experts with our experts; see `forward_tokens` for what a call does."""

    def __init__(self, config: Qwen3MoeConfig, computation: Computation) -> None:
        _choose(config, computation)
        super().__init__(config)
        self.computation = computation
        for layer in self.model.layers:
            if isinstance(layer.mlp, Qwen3MoeSparseMoeBlock):
                layer.mlp = MoEBlock(
                    hidden_size=config.hidden_size,
                    moe_intermediate_size=config.moe_intermediate_size,
                    num_experts=config.num_experts,
                    num_experts_per_tok=config.num_experts_per_tok,
                    norm_topk_prob=config.norm_topk_prob,
                    impl=computation.experts,
                )


CausalLM = DenseCausalLM | MoECausalLM


def _choose(config: Qwen3Config | Qwen3MoeConfig, computation: Computation) -> None:
    """Write into `config` what computes here, over what a config.json may say."""
    config._attn_implementation = computation.attention
    config._experts_implementation = "eager"  # never run: our experts take the place of theirs


@contextmanager
def attention_for_decoding(model: CausalLM) -> Iterator[None]:
    """Let transformers' forward, which generation calls token by token, use `sdpa`.

    FlexAttention would build and compile a block mask for every new length.
    """
    trained_with = model.config._attn_implementation
    model.config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        model.config._attn_implementation = trained_with


def forward_tokens(
    model: CausalLM,
    input_ids_PS: Tensor,
    position_ids_PS: Tensor,
    target_ids_PS: Tensor | None,
    token_mask_PS: Tensor | None,
    target_rows_N: Tensor | None,
    temperature: float,
    with_entropy: bool,
) -> TokenOutputs | Tensor:
    """Score every target of a micro-batch of packs.

    Args:
        model: Called through its `forward`, so that FSDP has gathered the output projection.
        input_ids_PS: `[P, S]`, int64, local to this rank.
        position_ids_PS: `[P, S]`, int64; documents of a pack are told apart by its restarts.
        target_ids_PS: `[P, S]`, int64, what each position should predict, -100 for nothing; None:
            return logits instead, for inputs small enough to hold them.
        token_mask_PS: `[P, S]`, bool, False for padding, which then counts neither in the
            load-balancing loss nor in the experts' token counts; None: every position counts.
        target_rows_N: `[N]`, int64, the places of targets among the `P·S` positions, in order;
            None: they are looked for, for which the host waits for the device.
        temperature: Divides the logits.
        with_entropy: Also return the entropy of each prediction.

    Returns:
        The outputs, or logits `[P, S, V]` in the compute dtype without targets.

    Collective: all ranks, FSDP's gathers and the experts' all-to-all, layer by layer.
    """
    blocks = moe_blocks(model)
    with record_routing(blocks) as records:
        hidden_PSD = _hidden_states(model, input_ids_PS, position_ids_PS)
    if target_ids_PS is None:
        return model.lm_head(hidden_PSD)
    log_probs_T, entropy_T = token_log_probs(
        hidden_PSD.flatten(0, 1),
        model.lm_head.weight,
        target_ids_PS.flatten(),
        temperature=temperature,
        target_rows_N=target_rows_N,
        chunk_tokens=model.computation.logits_chunk_tokens,
        with_entropy=with_entropy,
    )
    load_balancing_P, expert_counts_LE = _routing(
        records, log_probs_T, len(input_ids_PS), token_mask_PS
    )
    return TokenOutputs(
        # A copy: FSDP hooks its backward on outputs, which an in-place operation on a view loses.
        log_probs_PS=log_probs_T.view_as(target_ids_PS).clone(),
        entropy_PS=None if entropy_T is None else entropy_T.view_as(target_ids_PS),
        load_balancing_P=load_balancing_P,
        expert_counts_LE=expert_counts_LE,
    )


def moe_blocks(model: nn.Module) -> list[MoEBlock]:
    """Return the MoE blocks of a network in layer order; none if dense."""
    return [module for module in model.modules() if isinstance(module, MoEBlock)]


def _hidden_states(model: CausalLM, input_ids_PS: Tensor, position_ids_PS: Tensor) -> Tensor:
    """Return the normalized hidden states `[P, S, D]` after the last layer."""
    # The finished mask is passed because transformers' own detection of packs depends on which
    # other arguments are given and fails silently. Its caching is off for the same reason.
    mask = packed_mask(
        position_ids_PS, model.computation.attention, model.model.embed_tokens.weight.dtype
    )
    outputs = model.model(
        input_ids=input_ids_PS,
        attention_mask=_as_model_takes_it(model, mask),
        position_ids=position_ids_PS,
        use_cache=False,
        return_dict=True,
    )
    return outputs.last_hidden_state


def _as_model_takes_it(model: CausalLM, mask: Any) -> Any:
    # Of masks that are finished, the dense network takes one per kind of layer.
    return {"full_attention": mask} if isinstance(model, DenseCausalLM) else mask


def _routing(
    records: list[RoutingRecord], like: Tensor, num_packs: int, token_mask_PS: Tensor | None
) -> tuple[Tensor, Tensor]:
    if not records:
        none = torch.zeros(0, 0, dtype=torch.int64, device=like.device)
        return like.new_zeros(num_packs), none
    return summarize_routing(records, token_mask_PS)
