"""Builds the network of a config on a mesh: shapes, sharding, then weights.

Owns the order of construction and what is sharded how. Read next: `causal_lm.py` (the network),
`trainer/parallel/fsdp.py` (the policy), `init.py` and `weights.py` (the values); values from a
checkpoint come through `trainer/checkpoint/start.py`.
"""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig, Qwen3MoeConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from trainer.config.model import ModelConfig
from trainer.errors import UserError
from trainer.model.architecture import (
    QwenConfig,
    locate_model,
    resolve_architecture,
    resolve_generation,
)
from trainer.model.attention import choose_attention
from trainer.model.causal_lm import (
    CausalLM,
    Computation,
    DenseCausalLM,
    MoECausalLM,
    moe_blocks,
)
from trainer.model.experts import choose_experts_impl
from trainer.model.init import init_random_
from trainer.model.moe import MoEBlock
from trainer.model.rotary import rotary_embedding
from trainer.model.weights import load_weights_
from trainer.parallel.agreement import Ranks
from trainer.parallel.fsdp import (
    describe_expert_shards,
    prefetch_next_,
    shard_dense_,
    shard_experts_,
)
from trainer.parallel.mesh import ep_mesh

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def setup_model(
    config: ModelConfig,
    mesh: DeviceMesh,
    *,
    seed: int = 0,
    reshard_after_forward: bool = True,
    fill: Callable[[CausalLM], None] | None = None,
) -> CausalLM:
    """Build, shard and fill the network that `config` asks for.

    Parameter names and shapes are transformers' own; each parameter is a DTensor on the mesh's
    axes with fp32 values. The same config and seed give the same weights on any mesh.

    Args:
        config: The `model` section.
        mesh: From `trainer.parallel.build_mesh`.
        seed: Of random weights.
        reshard_after_forward: `parallel.reshard_after_forward`.
        fill: Gives every parameter its values; None: they are those that `config` asks for.

    Raises:
        UserError: on all ranks, if the name, the architecture, the weights or `parallel.ep` do not
            fit together.

    Collective: all ranks.

    Example:
        mesh = build_mesh(config.parallel, "cpu")
        model = setup_model(config.model, mesh)
        outputs = model(input_ids, position_ids=position_ids, target_ids=target_ids)
    """
    device = _device(mesh)
    hf_config, generation = Ranks().together(lambda: _resolve(config, ep_mesh(mesh).size()))
    with torch.device("meta"):
        model = _build(hf_config, _resolve_computation(config, hf_config, device.type))
    if generation is not None:
        model.generation_config = generation
    if config.activation_checkpointing:
        _checkpoint_activations_(model)
    _shard_(model, mesh, _DTYPES[config.compute_dtype], reshard_after_forward)
    _materialize_(model, device)
    if fill is not None:
        fill(model)
    elif config.weights == "random":
        init_random_(model, seed=seed, std=hf_config.initializer_range)
    else:
        _load_(model, config)
    if config.compile:
        _compile_(model)
    return model


def _resolve(config: ModelConfig, ep_size: int) -> tuple[QwenConfig, GenerationConfig | None]:
    hf_config = resolve_architecture(config)
    check_ep(hf_config.num_experts if isinstance(hf_config, Qwen3MoeConfig) else 0, ep_size)
    return hf_config, resolve_generation(config)


def check_ep(num_experts: int, ep_size: int) -> None:
    """Refuse an `ep` that leaves ranks with unequal numbers of experts.

    Args:
        num_experts: E; 0 for a dense network.
        ep_size: `parallel.ep`.

    Raises:
        UserError: `ep_size` does not divide E, or is above 1 without experts.
    """
    if num_experts % ep_size or (ep_size > 1 and num_experts == 0):
        raise UserError(
            f"parallel.ep={ep_size} does not divide num_experts={num_experts}: every rank of the "
            "ep axis holds as many experts; choose an ep that divides them (1 for a dense model)"
        )


def _resolve_computation(
    config: ModelConfig, hf_config: QwenConfig, device_type: str
) -> Computation:
    attention = choose_attention(config.attention, device_type)
    experts = "loop"
    if isinstance(hf_config, Qwen3MoeConfig):
        choice = choose_experts_impl(
            config.experts,
            dtype=_DTYPES[config.compute_dtype],
            hidden_size=hf_config.hidden_size,
            moe_intermediate_size=hf_config.moe_intermediate_size,
            device_type=device_type,
        )
        experts = choice.name
        logger.info("experts: %s (%s)", choice.name, choice.reason)
    logger.info("attention: %s", attention)
    return Computation(attention, experts, config.logits_chunk_tokens)


def _build(hf_config: QwenConfig, computation: Computation) -> CausalLM:
    if isinstance(hf_config, Qwen3MoeConfig):
        return MoECausalLM(hf_config, computation)
    return DenseCausalLM(hf_config, computation)


def _shard_(
    model: CausalLM, mesh: DeviceMesh, compute_dtype: torch.dtype, reshard_after_forward: bool
) -> None:
    """Make each layer's experts, each layer, and what remains FSDP units, inside out.

    A router belongs to its layer's unit, whose dtype it shares: it multiplies in the compute dtype
    and takes its softmax in fp32, as transformers' and inference engines' routers do.
    """
    units: list[list[nn.Module]] = []
    _log_expert_shards(model, mesh)
    for layer in model.model.layers:
        unit: list[nn.Module] = [layer]
        if isinstance(layer.mlp, MoEBlock):
            experts = layer.mlp.experts
            experts.set_ep(ep_mesh(mesh).get_group())
            shard_experts_(
                experts, mesh, compute_dtype, reshard_after_forward=reshard_after_forward
            )
            unit.append(experts)
        shard_dense_(layer, mesh, compute_dtype, reshard_after_forward=reshard_after_forward)
        units.append(unit)
    # Embeddings and output projection are needed again at the start of the backward.
    shard_dense_(model, mesh, compute_dtype, reshard_after_forward=False)
    prefetch_next_(units)


def _log_expert_shards(model: CausalLM, mesh: DeviceMesh) -> None:
    for block in moe_blocks(model)[:1]:
        for name, stack in block.experts.named_parameters():
            logger.info("%s %s", name, describe_expert_shards(tuple(stack.shape), mesh))


def _materialize_(model: CausalLM, device: torch.device) -> None:
    """Give a meta model memory: parameters without values, buffers with theirs, ties remade."""
    model.to_empty(device=device)
    model.model.register_module("rotary_emb", rotary_embedding(model.config).to(device))
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight


def _load_(model: CausalLM, config: ModelConfig) -> None:
    name = config.name
    assert name is not None, "ModelConfig has a source"
    folder = Ranks().together(lambda: locate_model(name, with_weights=True))
    is_tied = model.config.tie_word_embeddings
    copies = {"lm_head.weight": "model.embed_tokens.weight"} if is_tied else {}
    read = load_weights_(model, folder, copies=copies)
    logger.info(
        "read %d tensors, %.2f GiB from %s", read.num_tensors, read.num_bytes / 2**30, folder
    )


def _checkpoint_activations_(model: CausalLM) -> None:
    """Recompute each layer in the backward instead of keeping its activations."""
    for layer in cast(Iterable[GradientCheckpointingLayer], model.model.layers):
        recompute = partial(checkpoint, use_reentrant=False)
        if isinstance(layer.mlp, MoEBlock):
            recompute = partial(recompute, context_fn=layer.mlp.gate.checkpoint_contexts)
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = recompute  # pyright: ignore[reportArgumentType]


def _compile_(model: CausalLM) -> None:
    """Compile what has static shapes: attention, norms and dense MLPs, module by module."""
    for layer in model.model.layers:
        for name, module in layer.named_children():
            if not isinstance(module, MoEBlock):
                logger.debug("compiling %s", name)
                module.compile()


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)
