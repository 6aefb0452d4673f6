import json
from collections import Counter

import pytest

from tests.support.texts import (
    pack_ids,
    pretrain_data,
    texts,
    trained_pairs,
    write_jsonl_texts,
    write_parquet_texts,
)
from trainer.data.packing import deal
from trainer.data.shards.job import TokenizeRequest
from trainer.data.shards.writer import tokenize
from trainer.data.text import hub
from trainer.errors import UserError

END = 258


@pytest.fixture(params=["files", "parquet", "hub", "stream", "tokens"])
def source(request, tmp_path, monkeypatch):
    """Return a source of each kind with the same documents."""
    monkeypatch.setattr(hub, "PAGE_ROWS", 5)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    documents = texts(30)
    match request.param:
        case "files":
            path = write_jsonl_texts(tmp_path / "a.jsonl", documents)
            return {"type": "files", "path": str(path), "block_kib": 1}
        case "parquet":
            path = write_parquet_texts(tmp_path / "a.parquet", documents)
            return {"type": "files", "path": str(path)}
        case "tokens":
            path = write_jsonl_texts(tmp_path / "a.jsonl", documents)
            tokenize_files(path, tmp_path / "shards")
            return {"type": "tokens", "path": str(tmp_path / "shards")}
        case kind:
            for i in range(3):
                part = documents[10 * i : 10 * i + 10]
                write_parquet_texts(tmp_path / "set" / f"train-{i}.parquet", part)
            streaming = kind == "stream"
            return {"type": "hub", "path": str(tmp_path / "set"), "streaming": streaming}


def tokenize_files(path, folder):
    from trainer.config.pretrain import TextFilesSource

    request = TokenizeRequest(TextFilesSource(path=str(path)), folder, None, 1, 1 << 20)
    tokenize(request, lambda line: None)


def documents_of(packs):
    """Return texts of the documents, joined where a pack cut them (one open at a time)."""
    ids = [token for pack in packs for document in pack.documents for token in document.ids]
    text = bytes(token if token != END else 0 for token in ids).decode()
    return text.split("\0")


def test_an_epoch_trains_every_document_once(source):
    data = pretrain_data({**source, "max_epochs": 1}, pack_lookahead=1, seq_len=16)
    num_packs = -(-sum(len(text) + 1 for text in texts(30)) // 16)
    packs = data.train.next_packs(num_packs)
    with pytest.raises(UserError, match=rf"gone through max_epochs times, after {num_packs} packs"):
        data.train.next_packs(1)
    assert sorted(documents_of(packs)) == sorted(["", *texts(30)])
    assert all(pack.num_tokens == 16 for pack in packs[:-1])


@pytest.mark.parametrize("settings", [{}, {"split_documents": False}, {"pack_lookahead": 3}])
@pytest.mark.parametrize("num_before", [0, 7, 150])
def test_any_saved_position_goes_on_bit_for_bit(source, settings, num_before):
    first = pretrain_data(source, **settings).train
    first.next_packs(num_before)
    state = json.loads(json.dumps(first.state_dict()))
    resumed = pretrain_data(source, **settings).train
    resumed.load_state_dict(state)
    expected, found = first.next_packs(30), resumed.next_packs(30)
    assert pack_ids(found) == pack_ids(expected)
    assert trained_pairs(found) == trained_pairs(expected)
    assert resumed.state_dict() == first.state_dict()


def test_a_position_does_not_grow_and_is_reached_without_what_came_before(source, monkeypatch):
    stream = pretrain_data(source, pack_lookahead=4).train
    sizes = []
    for _ in range(4):
        stream.next_packs(100)
        sizes.append(len(json.dumps(stream.state_dict())))
    assert max(sizes) - min(sizes) < 40
    resumed = pretrain_data(source, pack_lookahead=4).train
    resumed.load_state_dict(stream.state_dict())
    assert resumed.epochs == stream.epochs
    assert stream.epochs[0] > 5


def test_ranks_share_one_order(source):
    stream = pretrain_data(source).train
    packs = stream.next_packs(12)
    dealt = [deal(packs, rank, 3) for rank in range(3)]
    assert [pack for group in zip(*dealt, strict=True) for pack in group] == packs


def test_seed_and_epoch_change_the_order_and_nothing_else(source):
    epoch = {seed: pack_ids(pretrain_data(source, seed).train.next_packs(15)) for seed in (0, 1)}
    assert epoch[0] != epoch[1]
    assert epoch[0] == pack_ids(pretrain_data(source, 0).train.next_packs(15))


@pytest.fixture
def mix(tmp_path):
    """Return a mix of three sources of different sizes, shares 5:3:2."""
    sizes = {"big": 40, "small": 4, "medium": 15}
    weights = {"big": 5.0, "small": 3.0, "medium": 2.0}
    parts = []
    for name, size in sizes.items():
        path = write_jsonl_texts(tmp_path / f"{name}.jsonl", texts(size, name))
        parts.append({"type": "files", "path": str(path), "weight": weights[name]})
    return {"type": "mix", "sources": parts}


def test_a_mix_has_exact_proportions_at_every_moment(mix):
    stream = pretrain_data(mix).train
    given = Counter()
    for turn in range(1, 300):
        (pack,) = stream.next_packs(1)
        given[pack.documents[0].source] += 1
        assert {document.source for document in pack.documents} == set(given) & {
            pack.documents[0].source
        }
        for source, share in enumerate((0.5, 0.3, 0.2)):
            assert abs(given[source] - share * turn) < 1
    assert stream.counts["packs/big"] == given[0]
    assert stream.counts["epochs/small"] > stream.counts["epochs/big"]


def test_a_source_that_ends_leaves_the_mix_to_the_others(mix):
    mix["sources"][1]["max_epochs"] = 2
    stream = pretrain_data(mix).train
    stream.next_packs(100)
    packs = stream.next_packs(70)
    assert Counter(pack.documents[0].source for pack in packs) == {0: 50, 2: 20}
    assert stream.epochs[1] == 2


def test_where_all_sources_end_is_told_and_the_position_is_that_of_the_last_batch(mix):
    for part in mix["sources"]:
        part["max_epochs"] = 1
    for prefetch in (False, True):
        stream = pretrain_data(mix, prefetch=prefetch).train
        message = r"max_epochs times, after \d+ packs: lower max_steps"
        with pytest.raises(UserError, match=message):
            list(map(stream.next_packs, [4] * 100))
        state = stream.state_dict()
        resumed = pretrain_data(mix, prefetch=prefetch).train
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state


def test_a_source_that_ended_goes_on_when_a_resumed_run_allows_more_epochs(mix):
    mix["sources"][1]["max_epochs"] = 2
    stream = pretrain_data(mix).train
    stream.next_packs(100)
    state = json.loads(json.dumps(stream.state_dict()))
    mix["sources"][1]["max_epochs"] = 5
    resumed = pretrain_data(mix).train
    resumed.load_state_dict(state)
    given = Counter(pack.documents[0].source for pack in resumed.next_packs(10))
    assert given == {0: 5, 1: 3, 2: 2}
    assert 2 <= resumed.epochs[1] <= 5


def test_more_epochs_do_not_change_what_came_before(mix):
    mix["sources"][1]["max_epochs"] = 40
    stream = pretrain_data(mix).train
    stream.next_packs(17)
    state, expected = stream.state_dict(), pack_ids(stream.next_packs(50))
    del mix["sources"][1]["max_epochs"]
    resumed = pretrain_data(mix).train
    resumed.load_state_dict(state)
    assert pack_ids(resumed.next_packs(50)) == expected


def test_fewer_epochs_than_it_had_end_a_source_at_once(mix):
    stream = pretrain_data(mix, pack_lookahead=1).train
    stream.next_packs(100)
    state = stream.state_dict()
    mix["sources"][1]["max_epochs"] = 1
    resumed = pretrain_data(mix, pack_lookahead=1).train
    resumed.load_state_dict(state)
    given = Counter(pack.documents[0].source for pack in resumed.next_packs(70))
    assert given[1] <= 1, "what is left of the document that was open"
    assert given[0] - given[2] * 5 / 2 < 5


@pytest.mark.parametrize("source", ["files"], indirect=True)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed: 1 in this run, 0 in the one that saved"),
        ({"shuffle": False}, "data.shuffle: False in this run"),
        ({"val": {"fraction": 0.1}}, "val.fraction: 0.1 in this run"),
    ],
)
def test_a_position_of_another_order_is_refused(source, change, message):
    state = pretrain_data(source).train.state_dict()
    with pytest.raises(UserError, match=message):
        pretrain_data(source, **change).train.load_state_dict(state)


def test_a_position_in_other_data_is_refused(tmp_path):
    path = write_jsonl_texts(tmp_path / "a.jsonl", texts(30))
    source = {"type": "files", "path": str(path)}
    state = pretrain_data(source).train.state_dict()
    write_jsonl_texts(path, texts(31))
    with pytest.raises(UserError, match=r"data\.source: .*'bytes'.* in this run"):
        pretrain_data(source).train.load_state_dict(state)
