import json
from pathlib import Path

import pytest

from tests.support.rows import chat_row, write_jsonl
from tests.support.tokenizers import byte_tokenizer
from trainer.config.data import DataConfig, FilesSource, ValConfig
from trainer.data.packing import Pack
from trainer.data.prefetch import PrefetchedStream
from trainer.data.setup import setup_sft_data
from trainer.data.stream import SFTStream
from trainer.errors import UserError


def make_stream(path: Path, prefetch: bool) -> SFTStream | PrefetchedStream:
    config = DataConfig(
        source=FilesSource(path=str(path)), seq_len=64, batch_size=3, prefetch=prefetch
    )
    return setup_sft_data(config, ValConfig(), byte_tokenizer(), 0).train


def ids(packs: list[Pack]) -> list[list[int]]:
    return [d.ids.tolist() for pack in packs for d in pack.documents]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", [chat_row(f"q{i}", "a" * i) for i in range(20)])


def test_prefetching_changes_neither_order_nor_position(path: Path) -> None:
    plain, ahead = make_stream(path, False), make_stream(path, True)
    assert isinstance(ahead, PrefetchedStream)
    for _ in range(10):
        assert ids(plain.next_packs(3)) == ids(ahead.next_packs(3))
        assert plain.state_dict() == ahead.state_dict()
        assert (plain.counts, plain.epochs) == (ahead.counts, ahead.epochs)


def test_resuming_throws_away_what_was_prepared(path: Path) -> None:
    plain, ahead = make_stream(path, False), make_stream(path, True)
    ahead.next_packs(3)
    plain.next_packs(3)
    state = json.loads(json.dumps(plain.state_dict()))
    ahead.next_packs(3)
    ahead.load_state_dict(state)
    assert ids(ahead.next_packs(3)) == ids(plain.next_packs(3))


def test_an_error_is_raised_when_its_batch_is_asked_for(tmp_path: Path) -> None:
    rows = [chat_row("q", "a")] * 3
    path = write_jsonl(tmp_path / "a.jsonl", [*rows, {"messages": []}])
    with pytest.raises(UserError, match=r"a\.jsonl:4"):
        make_stream(path, True).next_packs(3)
