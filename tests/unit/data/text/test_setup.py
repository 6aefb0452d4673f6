import pytest

from tests.support.texts import pretrain_data, texts, write_jsonl_texts
from trainer.data.prefetch import PrefetchedStream
from trainer.errors import UserError


@pytest.fixture
def source(tmp_path):
    path = write_jsonl_texts(tmp_path / "a.jsonl", texts(200))
    return {"type": "files", "path": str(path)}


def test_shares_are_told_however_large_the_weights(source):
    weights = (1.5e308, 0.5e308, 1e-300)
    parts = [source | {"name": str(i), "weight": weight} for i, weight in enumerate(weights)]
    told = pretrain_data({"type": "mix", "sources": parts}).description
    assert told.startswith("training on 0 75.0%, 1 25.0%, 2 0.0%;")


def test_whether_there_is_validation_is_told(source):
    told = [pretrain_data(source, val=val).description for val in ({}, {"fraction": 0.5})]
    assert told[0].endswith("; validating on nothing: neither val.source nor val.fraction is given")
    assert told[1].endswith(" packs")


def lines(packs):
    """Return the numbers of the documents that begin in the packs."""
    found = set()
    for pack in packs:
        for document in pack.documents:
            text = bytes(document.ids[document.ids < 256].tolist()).decode()
            if text.startswith("text "):
                found.add(int(text.split()[1].rstrip(":")))
    return found


@pytest.mark.parametrize("seed", [0, 1])
def test_held_out_documents_are_never_trained_on(source, seed):
    settings = {"split_documents": False, "seq_len": 64}
    data = pretrain_data(source, seed, val={"fraction": 0.2, "max_packs": 100}, **settings)
    held_out = lines(data.validation_packs)
    trained = lines(data.train.next_packs(200))
    assert held_out.isdisjoint(trained)
    assert held_out | trained == set(range(200))
    assert 20 < len(held_out) < 60
    other = pretrain_data(source, 1 - seed, val={"fraction": 0.2, "max_packs": 100}, **settings)
    assert lines(other.validation_packs) == held_out


def test_copies_of_a_held_out_document_are_held_out_too(tmp_path):
    path = write_jsonl_texts(tmp_path / "a.jsonl", texts(100) * 2)
    source = {"type": "files", "path": str(path)}
    settings = {"split_documents": False, "seq_len": 64}
    data = pretrain_data(source, val={"fraction": 0.2, "max_packs": 100}, **settings)
    trained = lines(data.train.next_packs(200))
    assert lines(data.validation_packs).isdisjoint(trained)


def test_validation_stops_at_its_packs(source):
    assert len(pretrain_data(source, val={"source": source, "max_packs": 3}).validation_packs) == 3
    assert pretrain_data(source).validation_packs == []


def test_nothing_to_validate_on_is_refused(tmp_path):
    path = write_jsonl_texts(tmp_path / "a.jsonl", texts(2))
    with pytest.raises(
        UserError, match=r"data\.source: a whole epoch has no document to be held out"
    ):
        pretrain_data({"type": "files", "path": str(path)}, val={"fraction": 1e-9})


def test_prefetching_gives_the_same_packs(source):
    plain = pretrain_data(source).train
    ahead = pretrain_data(source, prefetch=True).train
    assert isinstance(ahead, PrefetchedStream)
    for _ in range(3):
        expected, found = plain.next_packs(4), ahead.next_packs(4)
        assert [pack.num_tokens for pack in found] == [pack.num_tokens for pack in expected]
        assert ahead.state_dict() == plain.state_dict()
        assert ahead.counts == plain.counts


def test_prompts_become_ids(source):
    assert pretrain_data(source, val={"prompts": ["ab"]}).prompts == ((97, 98),)
