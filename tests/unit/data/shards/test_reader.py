import json
import os

import numpy as np
import pytest

from tests.support.texts import pack_ids, pretrain_data, texts, write_jsonl_texts
from trainer.config.pretrain import TextFilesSource
from trainer.data.shards import reader
from trainer.data.shards.job import TokenizeRequest
from trainer.data.shards.manifest import MANIFEST, read_manifest
from trainer.data.shards.reader import TokenPages
from trainer.data.shards.writer import tokenize
from trainer.data.text.pages import Shuffle
from trainer.errors import UserError

DOCUMENTS = texts(60)


@pytest.fixture
def folder(tmp_path):
    path = write_jsonl_texts(tmp_path / "a.jsonl", DOCUMENTS)
    source = TextFilesSource(path=str(path), block_kib=1)
    request = TokenizeRequest(source, tmp_path / "shards", None, 1, 1)
    tokenize(request, lambda line: None)
    return tmp_path / "shards"


def open_folder(folder, **settings):
    return pretrain_data({"type": "tokens", "path": str(folder)} | settings)


def documents(folder, shuffle, epoch=0):
    pages = TokenPages(folder, read_manifest(folder, "data.source"), shuffle)
    cursor, found = (0,), []
    while cursor is not None:
        page = pages.page(epoch, cursor)
        found += [page.documents[i] for i in range(len(page.documents))]
        cursor = page.following
    return [bytes(ids[:-1].tolist()).decode() for ids in found]


def test_every_document_of_every_shard_takes_part_in_one_shuffle(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "PAGE_DOCUMENTS", 7)
    for i in range(5):
        write_jsonl_texts(tmp_path / "src" / f"{i}.jsonl", texts(20, str(i)))
    monkeypatch.setattr("trainer.data.text.files.PAGE_BLOCKS", 1)
    source = TextFilesSource(path=str(tmp_path / "src"))
    manifest = tokenize(TokenizeRequest(source, tmp_path / "out", None, 1, 1), lambda line: None)
    assert len(manifest.shards) == 5
    expected = [text for i in range(5) for text in texts(20, str(i))]
    assert documents(tmp_path / "out", Shuffle(None)) == expected
    first = documents(tmp_path / "out", Shuffle("0"))
    second = documents(tmp_path / "out", Shuffle("0"), epoch=1)
    assert first != second
    assert sorted(first) == sorted(second) == sorted(expected)
    assert len({text.split()[0] for text in first[:20]}) > 2


def test_shards_give_what_the_text_gives(folder):
    path = folder.parent / "a.jsonl"
    settings = {"shuffle": False}
    text = pretrain_data({"type": "files", "path": str(path)}, **settings).train.next_packs(30)
    tokens = pretrain_data({"type": "tokens", "path": str(folder)}, **settings).train
    assert pack_ids(tokens.next_packs(30)) == pack_ids(text)


def test_documents_are_memory_mapped(folder):
    pages = TokenPages(folder, read_manifest(folder, "data.source"), Shuffle(None))
    ids = pages.document(0, 3)
    assert isinstance(ids, np.memmap)
    assert ids.dtype == np.uint16


@pytest.mark.parametrize("suffix", ["tokens", "ends"])
def test_a_missing_or_truncated_shard_is_refused_by_name(folder, suffix):
    path = folder / f"shard-00000.{suffix}"
    content = path.read_bytes()
    path.write_bytes(content[:-2])
    rule = f"has {len(content) - 2} bytes and should have {len(content)}"
    with pytest.raises(UserError, match=rf"data\.source: shard .*shard-00000\.{suffix} {rule}"):
        open_folder(folder)
    path.unlink()
    with pytest.raises(UserError, match=rf"shard .*shard-00000\.{suffix} is missing"):
        open_folder(folder)
    path.symlink_to(path)
    with pytest.raises(UserError, match=rf"shard-00000\.{suffix} is .*Too many levels of symbolic"):
        open_folder(folder)


def test_a_damaged_shard_is_refused_when_asked_to_verify(folder):
    path = folder / "shard-00000.tokens"
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    path.write_bytes(content)
    open_folder(folder)
    with pytest.raises(UserError, match=r"shard-00000\.tokens does not have the checksum"):
        open_folder(folder, verify=True)


def test_ids_of_another_tokenizer_are_refused(folder):
    path = folder / MANIFEST
    value = json.loads(path.read_text())
    value["tokenizer"] |= {"fingerprint": "0" * 32, "name": "other/tokenizer"}
    path.write_text(json.dumps(value))
    with pytest.raises(
        UserError, match=r"its ids are of the tokenizer 'other/tokenizer'.*built-in"
    ):
        open_folder(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"manifest\.json cannot be read \(No such file.*run it again to resume"),
        ("{", r"manifest\.json is damaged"),
        ('{"format": "trainer token shards 1"}', r"manifest\.json is damaged"),
        ("[]", r"manifest\.json is damaged"),
        ("\udcff", r"manifest\.json is damaged"),
        ('{"format": "other"}', "has format 'other', this version reads"),
    ],
)
def test_a_folder_that_is_not_finished_is_refused(folder, content, message):
    path = folder / MANIFEST
    path.unlink() if content is None else path.write_bytes(os.fsencode(content))
    with pytest.raises(UserError, match=message):
        open_folder(folder)


def test_ids_of_a_dtype_that_is_never_written_are_refused(folder):
    path = folder / MANIFEST
    path.write_text(path.read_text().replace('"<u2"', '"<u3"'))
    with pytest.raises(UserError, match=r"manifest\.json is damaged \(dtype: .*'<u2' or '<u4'"):
        open_folder(folder)


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("tokenizer", "num_ids", "259"),
        ("tokenizer", "start", [None]),
        ("shards", "tokens_checksum", None),
        ("shards", "num_documents", -1),
        ("shards", "num_tokens", 1.5),
        ("shards", "name", 3),
    ],
)
def test_a_manifest_with_a_field_of_another_kind_is_refused(folder, part, name, value):
    path = folder / MANIFEST
    manifest = json.loads(path.read_text())
    (manifest["shards"][0] if part == "shards" else manifest["tokenizer"])[name] = value
    path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=rf"manifest\.json is damaged \({part}\.(0\.)?{name}"):
        open_folder(folder)


@pytest.mark.parametrize("suffix", ["tokens", "ends"])
def test_damage_that_sizes_do_not_show_is_named_when_it_is_met(folder, suffix):
    path = next(folder.glob(f"*.{suffix}"))
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(UserError, match=r"shard-00000\.tokens or its ends file is damaged"):
        open_folder(folder).train.next_packs(1)


def test_a_shard_that_goes_away_in_mid_run_is_named(folder):
    pages = TokenPages(folder, read_manifest(folder, "data.source"), Shuffle(None))
    next(folder.glob("*.tokens")).unlink()
    with pytest.raises(UserError, match=r"shard-00000\.tokens or its ends file cannot be read"):
        pages.page(0, (0,)).documents[0]
