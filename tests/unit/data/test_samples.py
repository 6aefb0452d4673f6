"""Data of equal size are told apart by what they hold."""

import json
import logging

import pytest

from tests.support.rows import chat_row, write_jsonl
from tests.support.texts import pretrain_data, texts, write_jsonl_texts
from trainer.config.data import DataConfig, ValConfig
from trainer.data import build_byte_tokenizer, setup_sft_data
from trainer.data.samples import NUM_SAMPLED, check_samples, sample
from trainer.errors import UserError

NUM_ROWS = 60


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1000])
def test_a_sample_is_spread_evenly_over_all(size):
    places = []
    found = sample(size, lambda place: places.append(place) or place.to_bytes(8))
    assert len(found) == min(size, NUM_SAMPLED)
    assert places == sorted(set(places))
    if size:
        gaps = [b - a for a, b in zip([-1, *places], [*places, size], strict=True)]
        assert max(gaps) <= size // NUM_SAMPLED + 2


def sft(path):
    fields = {"source": {"type": "files", "path": str(path)}, "seq_len": 64, "prefetch": False}
    return setup_sft_data(DataConfig(**fields), ValConfig(), build_byte_tokenizer(), 0).train


def pretrain(path):
    return pretrain_data({"type": "files", "path": str(path)}).train


def rows(word):
    return [chat_row(f"{word}{i:03}", f"{i:03}") for i in range(NUM_ROWS)]


def documents(word):
    return [f"{word}{text}" for text in texts(NUM_ROWS)]


KINDS = pytest.mark.parametrize(
    ("open_stream", "write", "content"),
    [(sft, write_jsonl, rows), (pretrain, write_jsonl_texts, documents)],
    ids=["sft", "pretrain"],
)


@KINDS
def test_other_data_of_the_same_size_differ_in_their_state(tmp_path, open_stream, write, content):
    first = open_stream(write(tmp_path / "a.jsonl", content("a")))
    again = open_stream(write(tmp_path / "again" / "a.jsonl", content("a")))
    other = open_stream(write(tmp_path / "other" / "a.jsonl", content("b")))
    assert first.state_dict() == again.state_dict()
    # Ranks compare states before the first step.
    assert first.state_dict() != other.state_dict()
    assert first.state_dict()["identity"] == other.state_dict()["identity"]


@KINDS
def test_a_position_in_other_data_is_refused(tmp_path, open_stream, write, content):
    stream = open_stream(write(tmp_path / "a.jsonl", content("a")))
    stream.next_packs(2)
    state = json.loads(json.dumps(stream.state_dict()))
    other = open_stream(write(tmp_path / "a.jsonl", content("b")))
    with pytest.raises(UserError, match=r"data\.source: 60 of 60 rows or documents looked at are"):
        other.load_state_dict(state)
    del state["samples"]  # as in an older version's checkpoint
    other.load_state_dict(state)


@KINDS
def test_a_few_that_were_mended_are_no_other_data(tmp_path, caplog, open_stream, write, content):
    stream = open_stream(write(tmp_path / "a.jsonl", content("a")))
    stream.next_packs(2)
    mended = content("a")
    mended[0] = content("b")[0]
    other = open_stream(write(tmp_path / "a.jsonl", mended))
    with caplog.at_level(logging.WARNING):
        other.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert "data.source: 1 of 60 rows or documents looked at have changed" in caplog.text


def test_of_a_mix_the_source_is_named_and_what_cannot_be_read_says_nothing():
    check_samples([["a"], []], [["a"], ["b"]], "data.source")
    check_samples([["a"], ["b", "c"]], [["a"], ["b"]], "data.source")
    with pytest.raises(UserError, match=r"data\.source\.sources\[1\]: 1 of 1 rows"):
        check_samples([["a"], ["c"]], [["a"], ["b"]], "data.source")
