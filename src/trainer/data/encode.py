"""From rows to samples: token ids and the weight of each token in the loss.

Owns the mapping of trained characters to tokens. Always tokenizes a whole text at once, so that
ids are those that the tokenizer gives for it, and refuses a text in which a token crosses from
untrained into trained text. Read `packing.py` next.
"""

import copy
from collections.abc import Sequence

import numpy as np
from tokenizers import Encoding, processors
from transformers import PreTrainedTokenizerFast

from trainer.config.data import DataConfig
from trainer.data.chat import ChatRenderer, Span
from trainer.data.packing import Sample
from trainer.data.rows import BadRow, ChatRow, Row, TextRow
from trainer.errors import UserError


class SampleEncoder:
    """Turns parsed rows into samples.

    Args:
        tokenizer: a fast tokenizer.
        config: the `data` section (`train_on`, `template_kwargs`).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, config: DataConfig) -> None:
        self._renderer = ChatRenderer(tokenizer, config.template_kwargs)
        self._train_last_only = config.train_on == "last"
        self._backend = copy.deepcopy(tokenizer.backend_tokenizer)
        self._backend.no_truncation()
        self._backend.no_padding()
        # Offsets that leave out leading spaces would hide a token that crosses into trained text.
        self._backend.post_processor = processors.ByteLevel(trim_offsets=False)
        self._start_ids = start_ids(tokenizer)
        self._eos_id = eos_id(tokenizer)

    def encode(self, row: Row) -> list[Sample]:
        """Return the row's samples: one, or several if the template rewrites earlier turns.

        Raises:
            BadRow: the template refuses the row, or a token crosses into trained text.
        """
        if isinstance(row, TextRow):
            return [self._encode_text(row)]
        turns = row.assistant_turns[-1:] if self._train_last_only else row.assistant_turns
        return [
            self._sample(self._encode(rendering.text), rendering.spans, row.weight)
            for rendering in self._renderer.render(row, turns)
        ]

    def prompt_ids(self, row: Row) -> list[int]:
        """Return the tokens after which the model is to write the row's (last) answer.

        Raises:
            BadRow: the template refuses the row.
        """
        if isinstance(row, ChatRow):
            return self._encode(self._renderer.prompt(row.question, row.tools)).ids
        return [*self._start_ids, *self._encode(row.prompt).ids]

    def _encode(self, text: str) -> Encoding:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRow(
                "not_unicode",
                f"the text holds half a surrogate pair ({error.reason} at character "
                f"{error.start}): mend the escape, or remove it",
            ) from error
        return self._backend.encode(text, add_special_tokens=False)

    def _encode_text(self, row: TextRow) -> Sample:
        """Encode prompt and completion between the tokenizer's start token, if any, and one EOS."""
        text = row.prompt + row.completion
        sample = self._sample(self._encode(text), [(len(row.prompt), len(text))], row.weight)
        ids, weights = sample.ids, sample.weights
        if ids[-1] != self._eos_id:
            ids = np.append(ids, self._eos_id)
            weights = np.append(weights, np.float32(row.weight))
        start = np.asarray(self._start_ids, dtype=np.int64)
        return Sample(
            np.concatenate([start, ids]),
            np.concatenate([np.zeros(len(start), np.float32), weights]),
        )

    def _sample(self, encoding: Encoding, spans: Sequence[Span], weight: float) -> Sample:
        weights = np.zeros(len(encoding.ids), dtype=np.float32)
        offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        for start, end in spans:
            crosses = (offsets[:, 0] < start) & (offsets[:, 1] > start)
            crosses |= (offsets[:, 0] < end) & (offsets[:, 1] > end)
            if crosses.any():
                token = encoding.tokens[int(crosses.argmax())]
                raise BadRow(
                    "token_crosses",
                    f"the token {token!r} crosses the border between untrained and trained text: "
                    "end the prompt before the space (or letter) and begin the completion with it",
                )
            inside = (offsets[:, 0] >= start) & (offsets[:, 1] <= end)
            weights[inside & (offsets[:, 1] > offsets[:, 0])] = weight
        return Sample(np.asarray(encoding.ids, dtype=np.int64), weights)


def start_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return what the tokenizer puts before a text of its own accord (its BOS token, if any).

    Judged by position, not by id: a BOS equal to the EOS is kept at both ends.
    """
    plain = tokenizer.encode("a", add_special_tokens=False)
    full = tokenizer.encode("a", add_special_tokens=True)
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start]
    return []


def eos_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the token that ends a text.

    Raises:
        UserError: there is none.
    """
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise UserError(
            f"data.tokenizer: its eos_token is {tokenizer.eos_token!r}, so answers would never "
            "end: set one in its tokenizer_config.json"
        )
    return end
