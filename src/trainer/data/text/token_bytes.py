"""How many bytes of text each token stands for: the denominator of bits per byte."""

import json
import re
from collections.abc import Iterable

import numpy as np
from transformers import PreTrainedTokenizerFast

from trainer.data.packing import MASKED, Pack

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_WORD_START = "▁"


def token_bytes(tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """Return the UTF-8 bytes that each id stands for, int64 [highest id + 1]; special tokens: 0.

    Exact for byte-level tokenizers, whose tokens have a letter a byte. For others a token's own
    text counts, with the mark of a word's start as one space.
    """
    is_byte_level = "ByteLevel" in _component_types(tokenizer)
    vocabulary = tokenizer.get_vocab()
    added = tokenizer.added_tokens_decoder
    sizes = np.zeros(max(vocabulary.values()) + 1, dtype=np.int64)
    for token, index in vocabulary.items():
        if index in added:
            sizes[index] = 0 if added[index].special else len(token.encode())
        elif is_byte_level:
            sizes[index] = len(token)
        elif _BYTE_TOKEN.fullmatch(token):
            sizes[index] = 1
        else:
            sizes[index] = len(token.replace(_WORD_START, " ").encode())
    return sizes


def trained_bytes(packs: Iterable[Pack], sizes: np.ndarray) -> int:
    """Return the bytes of text that the packs' targets stand for."""
    targets = [d.targets[d.targets != MASKED] for pack in packs for d in pack.documents]
    return sum(int(sizes[ids].sum()) for ids in targets)


def _component_types(tokenizer: PreTrainedTokenizerFast) -> set[str]:
    """Return the kinds of pre-tokenizers and decoders that the tokenizer is made of."""
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    parts = [described.get(name) or {} for name in ("pre_tokenizer", "decoder")]
    inner = [
        child
        for part in parts
        for key in ("pretokenizers", "decoders")
        for child in part.get(key, [])
    ]
    return {part["type"] for part in [*parts, *inner] if part}
