import numpy as np
import pytest

from tests.support.tokenizers import byte_tokenizer
from trainer.data.text.encode import TextEncoder, identify
from trainer.errors import UserError


def test_a_document_is_its_tokens_and_one_end():
    encoder = TextEncoder(byte_tokenizer())
    assert encoder.encode("aé").tolist() == [97, 0xC3, 0xA9, 258]
    assert encoder.prompt_ids("a") == [97]
    stored = np.asarray([1, 2], dtype=np.uint16)
    assert encoder.encode(stored) is stored


def test_text_that_spells_a_special_token_is_plain_text():
    text = "a<|im_end|>b<|endoftext|>"
    assert TextEncoder(byte_tokenizer()).encode(text).tolist() == [*text.encode(), 258]


def test_the_start_token_of_a_tokenizer_is_kept():
    tokenizer = byte_tokenizer()
    from tokenizers import processors

    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_end|> $A", special_tokens=[("<|im_end|>", 258)]
    )
    assert TextEncoder(tokenizer).encode("a").tolist() == [258, 97, 258]
    assert identify(tokenizer).start == (258,)
    assert identify(tokenizer).fingerprint != identify(byte_tokenizer()).fingerprint


def test_identity_survives_saving_and_tells_vocabularies_apart(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    identity = identify(tokenizer)
    assert identify(AutoTokenizer.from_pretrained(tmp_path)).fingerprint == identity.fingerprint
    assert (identity.num_ids, identity.end) == (259, 258)
    tokenizer.add_tokens(["hello"])
    assert identify(tokenizer).fingerprint != identity.fingerprint


def test_a_tokenizer_without_end_token_is_refused():
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="its eos_token is None"):
        TextEncoder(tokenizer)
