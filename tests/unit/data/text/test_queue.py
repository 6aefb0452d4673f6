import json
from collections import Counter

import numpy as np
import pytest

from tests.support.texts import pack_ids, pretrain_data, texts, trained_pairs, write_jsonl_texts

END = 258


@pytest.fixture
def source(tmp_path):
    path = write_jsonl_texts(tmp_path / "a.jsonl", texts(50))
    return {"type": "files", "path": str(path)}


def every_pair(documents):
    """Return (token, token predicted from it) of documents, each inside its own."""
    return [
        pair
        for text in documents
        for pair in zip(text.encode(), [*text.encode()[1:], END], strict=True)
    ]


@pytest.mark.parametrize("settings", [{}, {"split_documents": False}])
@pytest.mark.parametrize("attend", [False, True])
@pytest.mark.parametrize("seq_len", [8, 32, 500])
def test_each_token_is_trained_once_an_epoch_and_never_across_documents(
    source, settings, attend, seq_len
):
    val = {"source": source, "max_packs": 10_000}
    settings = settings | {"attend_across_documents": attend, "seq_len": seq_len}
    packs = pretrain_data(source, val=val, **settings).validation_packs
    assert sorted(trained_pairs(packs)) == sorted(every_pair(texts(50)))
    assert all(pack.num_tokens <= seq_len for pack in packs)


def test_attention_across_documents_makes_one_document_of_a_pack(source):
    apart = pretrain_data(source).train.next_packs(20)
    together = pretrain_data(source, attend_across_documents=True).train.next_packs(20)
    assert all(len(pack.documents) == 1 for pack in together)
    assert any(len(pack.documents) > 1 for pack in apart)
    assert [np.concatenate(ids).tolist() for ids in pack_ids(apart)] == [
        ids[0] for ids in pack_ids(together)
    ]
    assert trained_pairs(apart) == trained_pairs(together)


def test_whole_documents_are_kept_where_they_fit(source):
    packs = pretrain_data(source, split_documents=False, seq_len=40).train.next_packs(20)
    for pack in packs:
        assert pack.num_tokens <= 40
        assert all(document.ids[-1] == END for document in pack.documents)


def test_open_documents_take_turns(tmp_path):
    for letter in "abcd":
        (tmp_path / f"{letter}.txt").write_text(letter * 1000)
    source = {"type": "files", "path": str(tmp_path)}
    packs = pretrain_data(source, pack_lookahead=4).train.next_packs(8)
    letters = [chr(pack.documents[0].ids[0]) for pack in packs]
    assert sorted(letters[:4]) == list("abcd")
    assert letters[4:] == letters[:4]
    one_by_one = pretrain_data(source, pack_lookahead=1).train.next_packs(8)
    assert len({chr(pack.documents[0].ids[0]) for pack in one_by_one}) == 1


@pytest.mark.parametrize("lengths", [[1000] * 4, [1000, 30, 500, 1700]], ids=["equal", "unequal"])
def test_a_source_of_few_documents_is_gone_through_before_it_begins_anew(tmp_path, lengths):
    documents = {letter: letter * n for letter, n in zip("abcd", lengths, strict=True)}
    for letter, document in documents.items():
        (tmp_path / f"{letter}.txt").write_text(document)
    stream = pretrain_data({"type": "files", "path": str(tmp_path)}, seq_len=50).train
    counts, epochs = Counter(), []
    for _ in range(3 * (sum(lengths) + len(lengths)) // 50):
        (pack,) = stream.next_packs(1)
        counts.update(chr(i) for document in pack.documents for i in document.ids if i < 256)
        epochs.append(stream.epochs[0])
        gone_through = [counts[letter] / len(document) for letter, document in documents.items()]
        # What is begun an epoch later is another document than those still open.
        assert max(gone_through) <= epochs[-1] + 2
    assert min(gone_through) >= 2
    assert epochs[0] == 0
    assert epochs == sorted(epochs)
    assert 2 <= epochs[-1] <= 3


def test_copies_within_an_epoch_are_open_at_once(tmp_path):
    source = {"type": "files", "path": str(write_jsonl_texts(tmp_path / "a.jsonl", ["same"] * 9))}
    stream = pretrain_data(source, pack_lookahead=4).train
    stream.next_packs(1)
    assert len(stream.state_dict()["queues"][0]["open"]) >= 3


def test_a_long_document_takes_one_line_of_a_position_whatever_its_length(tmp_path):
    documents = ["first", "long " * 4000, *texts(20)]
    source = {"type": "files", "path": str(write_jsonl_texts(tmp_path / "a.jsonl", documents))}
    settings = {"split_documents": False, "shuffle": False, "seq_len": 16, "pack_lookahead": 4}
    stream = pretrain_data(source, **settings).train
    stream.next_packs(500)
    state = json.loads(json.dumps(stream.state_dict()))
    assert len(state["queues"][0]["open"]) == 4
    other = pretrain_data(source, **settings).train
    other.load_state_dict(state)
    assert pack_ids(other.next_packs(900)) == pack_ids(stream.next_packs(900))
    once = {"source": source, "max_packs": 10_000}
    packs = pretrain_data(source, val=once, **settings).validation_packs
    assert sorted(trained_pairs(packs)) == sorted(every_pair(documents))


def test_a_position_without_a_rest_is_one_of_an_older_version(source):
    stream, other = (pretrain_data(source, split_documents=False).train for _ in range(2))
    stream.next_packs(3)
    state = stream.state_dict()
    del state["queues"][0]["rest"]
    other.load_state_dict(state)
    assert pack_ids(other.next_packs(5)) == pack_ids(stream.next_packs(5))
