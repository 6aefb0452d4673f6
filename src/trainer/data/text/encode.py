"""Documents as token ids, and how a tokenizer is told from another.

Owns what stands around a document's tokens: the tokenizer's own start token, if any, and one end
token. The same encoder serves training on text and `trainer tokenize`, so both give the same ids.
"""

import copy
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerFast

from trainer.data.encode import eos_id, start_ids
from trainer.data.text.pages import Content

PROBE = (
    "The quick  brown fox\n\tjumps over 13 lazy dogs: naïve café, 日本語, Ünïcödé 🦊 x_1 += 2.5e-3;"
)
"""Text whose ids tell tokenizers of equal vocabulary apart (merges, normalization, splitting)."""


@dataclass(frozen=True)
class TokenizerIdentity:
    """What makes token ids mean the same.

    Args:
        name: for people: folder, hub name or class.
        num_ids: one more than the highest id.
        start: ids before every document.
        end: id after every document.
        fingerprint: of vocabulary, start and end ids, and the ids of a probe text.
    """

    name: str
    num_ids: int
    start: tuple[int, ...]
    end: int
    fingerprint: str


class TextEncoder:
    """Turns documents into ids between the tokenizer's start token, if any, and one end token.

    Text that spells a special token is plain text: no document can end itself or start a turn.

    Args:
        tokenizer: a fast tokenizer.

    Raises:
        UserError: it has no end token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._backend = copy.deepcopy(tokenizer.backend_tokenizer)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        self._start = np.asarray(start_ids(tokenizer), dtype=np.int32)
        self._end = np.asarray([eos_id(tokenizer)], dtype=np.int32)

    def encode(self, content: Content) -> np.ndarray:
        """Return ids [n], int32; ids of token shards are left as they lie."""
        if isinstance(content, np.ndarray):
            return content
        return self.encode_batch([content])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return each text's ids, int32."""
        encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.concatenate([self._start, e.ids, self._end]).astype(np.int32) for e in encoded]

    def prompt_ids(self, text: str) -> list[int]:
        """Return the ids of a document that is to go on: no end token."""
        return self.encode(text)[:-1].tolist()


def identify(tokenizer: PreTrainedTokenizerFast) -> TokenizerIdentity:
    """Return what tells this tokenizer from another.

    By what it does, not by its files: another version of a library may write them differently.
    """
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    start, end = tuple(start_ids(tokenizer)), eos_id(tokenizer)
    probe = TextEncoder(tokenizer).encode(PROBE).tolist()
    content = json.dumps([vocabulary, start, end, probe])
    return TokenizerIdentity(
        name=tokenizer.name_or_path or "built-in byte-level tokenizer",
        num_ids=vocabulary[-1][1] + 1,
        start=start,
        end=end,
        fingerprint=hashlib.blake2b(content.encode(), digest_size=16).hexdigest(),
    )
