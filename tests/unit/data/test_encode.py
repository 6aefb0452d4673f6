import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tokenizers import (
    DROPS_EARLIER_REASONING,
    PLAIN_CHATML,
    byte_tokenizer,
    merging_tokenizer,
)
from trainer.config.data import DataConfig, FilesSource
from trainer.data.encode import SampleEncoder
from trainer.data.packing import Sample
from trainer.data.rows import BadRow, parse_row

CONFIG = DataConfig(source=FilesSource(path="unused"))


def encode(tokenizer, raw: dict, **settings: object) -> list[Sample]:
    config = CONFIG.model_copy(update=settings)
    return SampleEncoder(tokenizer, config).encode(parse_row(raw))


def chat(*contents: str) -> dict:
    roles = ["user", "assistant"] * len(contents)
    return {
        "messages": [
            {"role": role, "content": content}
            for role, content in zip(roles, contents, strict=False)
        ]
    }


def trained_text(tokenizer, sample: Sample) -> str:
    return tokenizer.decode(sample.ids[sample.weights > 0])


def test_ids_are_those_of_the_whole_rendering() -> None:
    tokenizer = merging_tokenizer([("a", "a"), ("Ċ", "Ċ")], trim_offsets=True)
    row = chat("aaa", "aa", "a", "aaaa")
    (sample,) = encode(tokenizer, row)
    text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
    assert sample.ids.tolist() == tokenizer(text, add_special_tokens=False).input_ids
    assert trained_text(tokenizer, sample) == "aa<|im_end|>aaaa<|im_end|>"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=12), min_size=2, max_size=6))
def test_any_text_is_masked_exactly(contents: list[str]) -> None:
    """Characters of several bytes, blanks and line ends included."""
    contents = [c.encode("utf-8", "ignore").decode() for c in contents]
    tokenizer = byte_tokenizer(PLAIN_CHATML)
    (sample,) = encode(tokenizer, chat(*contents))
    expected = "".join(content + "<|im_end|>" for content in contents[1::2])
    assert trained_text(tokenizer, sample) == expected


@pytest.mark.parametrize("trim_offsets", [True, False])
def test_a_token_that_crosses_into_trained_text_is_refused(trim_offsets: bool) -> None:
    tokenizer = merging_tokenizer([("Ġ", "w")], trim_offsets)
    with pytest.raises(BadRow, match=r"token 'Ġw' crosses") as caught:
        encode(tokenizer, {"prompt": "hello ", "completion": "world"})
    assert caught.value.reason == "token_crosses"
    (sample,) = encode(tokenizer, {"prompt": "hello", "completion": " world"})
    assert trained_text(tokenizer, sample) == " world<|im_end|>"


def test_turn_borders_that_merge_are_refused() -> None:
    tokenizer = merging_tokenizer([("Ċ", "a")], trim_offsets=True)
    with pytest.raises(BadRow, match=r"token 'Ċa' crosses"):
        encode(tokenizer, chat("q", "a"))


def test_text_rows_train_the_completion_and_one_end_token() -> None:
    tokenizer = byte_tokenizer()
    (sample,) = encode(tokenizer, {"prompt": "ab", "completion": "c", "weight": 0.5})
    assert sample.ids.tolist() == [*b"abc", tokenizer.eos_token_id]
    assert sample.weights.tolist() == [0, 0, 0.5, 0.5]
    (ended,) = encode(tokenizer, {"prompt": "ab", "completion": "c<|im_end|>"})
    assert ended.ids.tolist() == sample.ids.tolist()


def test_an_empty_prompt_trains_the_whole_completion() -> None:
    (sample,) = encode(byte_tokenizer(), {"prompt": "", "completion": "ab"})
    assert sample.weights.tolist() == [1, 1, 1]


def test_a_start_token_equal_to_the_end_token_is_kept_at_both_ends() -> None:
    tokenizer = merging_tokenizer([], trim_offsets=False, bos="<|im_end|>")
    assert tokenizer.bos_token_id == tokenizer.eos_token_id
    (sample,) = encode(tokenizer, {"prompt": "a", "completion": "b"})
    assert tokenizer.decode(sample.ids) == "<|im_end|>ab<|im_end|>"
    assert sample.weights.tolist() == [0, 0, 1, 1]


def test_only_the_last_turn_is_trained_when_asked() -> None:
    tokenizer = byte_tokenizer()
    (sample,) = encode(tokenizer, chat("q", "a1", "r", "a2"), train_on="last")
    assert trained_text(tokenizer, sample) == "a2<|im_end|>"
    assert "a1" in tokenizer.decode(sample.ids)


def test_a_rewriting_template_gives_one_sample_a_turn() -> None:
    tokenizer = byte_tokenizer(DROPS_EARLIER_REASONING)
    samples = encode(tokenizer, chat("q", "a1", "r", "a2"))
    assert [trained_text(tokenizer, sample) for sample in samples] == [
        "<think>\n\n</think>\n\na1<|im_end|>",
        "<think>\n\n</think>\n\na2<|im_end|>",
    ]


@pytest.mark.parametrize("raw", [chat("q", "a"), {"prompt": "q", "completion": "a"}])
def test_prompt_ids_are_the_start_of_the_sample_up_to_the_trained_tokens(raw: dict) -> None:
    tokenizer = byte_tokenizer()
    encoder = SampleEncoder(tokenizer, CONFIG)
    (sample,) = encoder.encode(parse_row(raw))
    first = int(np.flatnonzero(sample.weights)[0])
    assert encoder.prompt_ids(parse_row(raw)) == sample.ids[:first].tolist()


def test_half_a_surrogate_pair_makes_a_bad_row() -> None:
    with pytest.raises(BadRow, match="half a surrogate pair"):
        encode(byte_tokenizer(), chat("q\ud800", "a"))


def test_row_weights_scale_every_trained_token() -> None:
    (sample,) = encode(byte_tokenizer(), {**chat("q", "a"), "weight": 2.0})
    assert set(sample.weights.tolist()) == {0.0, 2.0}


def test_variables_of_the_config_reach_the_template() -> None:
    tokenizer = byte_tokenizer("{{ greeting }}" + PLAIN_CHATML)
    (sample,) = encode(tokenizer, chat("q", "a"), template_kwargs={"greeting": "hello "})
    assert tokenizer.decode(sample.ids).startswith("hello ")
