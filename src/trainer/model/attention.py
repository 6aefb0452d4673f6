"""Masks that keep packed documents apart, for each attention implementation of transformers.

Owns which token may see which, from `position_ids` alone. The attention itself is transformers'
(`eager`, `sdpa`, `flex_attention`), which takes a finished mask as it is.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from trainer.errors import UserError

AttentionName = Literal["eager", "sdpa", "flex_attention"]

_BLOCK_SIZE = 128
"""FlexAttention's default sparse block."""


def choose_attention(
    requested: Literal["auto", "eager", "sdpa", "flex_attention"], device_type: str
) -> AttentionName:
    """Resolve `model.attention`; `auto` keeps memory linear in the sequence on GPUs.

    Raises:
        UserError: `flex_attention` on a CPU, where torch has no backward for it.
    """
    if requested == "flex_attention" and device_type != "cuda":
        raise UserError(
            f"model.attention='flex_attention' cannot train on device {device_type!r}: "
            "use model.attention = 'auto', 'sdpa' or 'eager'"
        )
    if requested != "auto":
        return requested
    return "flex_attention" if device_type == "cuda" else "sdpa"


def document_ids(position_ids_PS: Tensor) -> Tensor:
    """Number the documents of each pack from 0: one starts wherever positions do not count on.

    Args:
        position_ids_PS: `[P, S]`, int64.

    Returns:
        `[P, S]`, int64, ascending along S.
    """
    starts_PS = position_ids_PS.diff(dim=1) != 1
    return torch.nn.functional.pad(starts_PS, (1, 0)).cumsum(1)


def packed_mask(
    position_ids_PS: Tensor, attention: AttentionName, dtype: torch.dtype
) -> Tensor | BlockMask:
    """Return the mask that lets a token see itself and what precedes it in its own document.

    Args:
        position_ids_PS: `[P, S]`, int64, restarting at each document.
        attention: For which implementation.
        dtype: Of the attention scores; `eager` adds its mask to them.

    Returns:
        `sdpa`: bool `[P, 1, S, S]`; `eager`: the same, 0 or the lowest number of `dtype`;
        `flex_attention`: a block mask, of memory linear in S but for one bit pair per block pair.
    """
    documents_PS = document_ids(position_ids_PS)
    match attention:
        case "sdpa":
            return _dense_mask(documents_PS)
        case "eager":
            hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=documents_PS.device)
            return torch.where(_dense_mask(documents_PS), torch.zeros_like(hidden), hidden)
        case "flex_attention":
            return _block_mask(documents_PS)


def _dense_mask(documents_PS: Tensor) -> Tensor:
    same_document = documents_PS.unsqueeze(2) == documents_PS.unsqueeze(1)
    return same_document.tril().unsqueeze(1)


def _block_mask(documents_PS: Tensor) -> BlockMask:
    """Build a block mask from the first and last document of each block.

    Documents ascend, so a block of keys at or before a block of queries is needed exactly if its
    last document reaches the queries' first, and needed whole if both are all one document.
    Nothing of size S x S exists at any time, and nothing waits for the device.
    """
    seq_len = documents_PS.shape[1]
    num_blocks = -(-seq_len // _BLOCK_SIZE)
    padding = (0, num_blocks * _BLOCK_SIZE - seq_len)
    padded = torch.nn.functional.pad(documents_PS.float(), padding, mode="replicate")
    blocks = padded.unflatten(1, (num_blocks, _BLOCK_SIZE))
    first, last = blocks[..., 0], blocks[..., -1]
    block = torch.arange(num_blocks, device=documents_PS.device)
    is_earlier = block.unsqueeze(1) > block.unsqueeze(0)
    is_same = block.unsqueeze(1) == block.unsqueeze(0)
    overlaps = last.unsqueeze(1) >= first.unsqueeze(2)
    is_whole = is_earlier & (first.unsqueeze(1) == last.unsqueeze(2))
    is_partial = ((is_earlier & overlaps) | is_same) & ~is_whole

    def mask_mod(pack: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents_PS[pack, query] == documents_PS[pack, key])

    partial_counts, partial_indices = _ordered(is_partial)
    whole_counts, whole_indices = _ordered(is_whole)
    return BlockMask.from_kv_blocks(
        partial_counts,
        partial_indices,
        whole_counts,
        whole_indices,
        BLOCK_SIZE=_BLOCK_SIZE,
        mask_mod=mask_mod,
        seq_lengths=(seq_len, seq_len),
    )


def _ordered(is_needed: Tensor) -> tuple[Tensor, Tensor]:
    """Return, per pack and query block, how many key blocks are needed and which, those first.

    Args:
        is_needed: bool, packs x query blocks x key blocks.

    Returns:
        int32 counts `[P, 1, blocks]` and int32 indices `[P, 1, blocks, blocks]`.
    """
    indices = is_needed.int().argsort(dim=-1, descending=True, stable=True)
    counts = is_needed.sum(-1)
    return counts.int().unsqueeze(1), indices.int().unsqueeze(1)
