"""Generation with the live, sharded model; transformers does the decoding.

Owns padding of prompts and keeping ranks in step. A sharded model gathers its weights in every
forward, so all ranks run as many forwards however soon their own texts end (`synced_gpus`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig

from trainer.model.causal_lm import CausalLM
from trainer.model.inference import inference


def generate_greedily(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_id: int,
    pad_id: int,
    device: torch.device,
) -> list[list[int]]:
    """Return the most likely continuation of each prompt, without the end token.

    Args:
        model: From `setup_model`.
        prompts: Token ids; not empty, as many on every rank.
        max_new_tokens: Longest continuation.
        eos_id: Ends a continuation.
        pad_id: Fills prompts on the left; masked.
        device: Of this rank.

    Collective: forward passes as FSDP and expert dispatch do, equally many on every rank.
    """
    input_ids, attention_mask = pad_left(prompts, pad_id, device)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=eos_id,
        pad_token_id=pad_id,
    )
    with inference(model):
        generated = model.generate(  # pyright: ignore[reportAttributeAccessIssue] - typed by a protocol
            input_ids=input_ids,
            attention_mask=attention_mask,
            generation_config=config,
            synced_gpus=True,
        )
    return [until(ids, eos_id) for ids in generated[:, input_ids.shape[1] :].tolist()]


def pad_left(
    prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return ids and mask, int64 `[num_prompts, longest]`, prompts flush right."""
    longest = max(len(prompt) for prompt in prompts)
    ids = [[pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def until(ids: list[int], end: int) -> list[int]:
    """Return the ids before the first `end`."""
    return ids[: ids.index(end)] if end in ids else ids
