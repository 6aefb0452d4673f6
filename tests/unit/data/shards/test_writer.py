import gzip
import json
import os
import signal
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.texts import texts, write_jsonl_texts
from trainer.config.pretrain import TextFilesSource
from trainer.data.shards import writer
from trainer.data.shards.job import TokenizeRequest
from trainer.data.shards.manifest import MANIFEST, checksum, read_manifest, tokens_path
from trainer.data.shards.reader import TokenPages
from trainer.data.shards.writer import tokenize
from trainer.data.text.pages import Shuffle
from trainer.errors import UserError


@pytest.fixture
def request_(tmp_path, monkeypatch):
    """Return a request for five shards, one of each file."""
    monkeypatch.setattr("trainer.data.text.files.PAGE_BLOCKS", 1)
    for i in range(5):
        write_jsonl_texts(tmp_path / "src" / f"{i}.jsonl", texts(20, str(i)))
    source = TextFilesSource(path=str(tmp_path / "src"))
    return TokenizeRequest(source, tmp_path / "out", None, 1, 1)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_the_manifest_counts_and_checks_what_was_written(request_):
    manifest = tokenize(request_, lambda line: None)
    documents = [text for i in range(5) for text in texts(20, str(i))]
    totals = manifest.to_json()
    num_bytes = sum(len(text.encode()) for text in documents)
    assert totals["num_documents"] == 100
    assert totals["num_bytes"] == num_bytes
    assert totals["num_tokens"] == num_bytes + 100
    assert (manifest.dtype, manifest.tokenizer.num_ids) == ("<u2", 259)
    for shard in manifest.shards:
        assert checksum(tokens_path(request_.folder, shard.name)) == shard.tokens_checksum
    assert read_manifest(request_.folder, "data.source") == manifest


@pytest.mark.parametrize("num_done", [0, 2, 5])
def test_an_interrupted_run_is_taken_up_where_it_stopped(request_, monkeypatch, num_done):
    whole = tokenize(request_, lambda line: None)
    expected = contents(request_.folder)
    for shard in whole.shards[num_done:]:
        (request_.folder / f"{shard.name}.json").unlink()
        tokens_path(request_.folder, shard.name).write_bytes(b"half")
    (request_.folder / MANIFEST).unlink()
    written = []
    write_shard = writer.write_shard
    monkeypatch.setattr(
        writer, "write_shard", lambda job: written.append(job.name) or write_shard(job)
    )
    assert tokenize(request_, lambda line: None) == whole
    assert written == [shard.name for shard in whole.shards[num_done:]]
    assert contents(request_.folder) == expected


def test_shards_of_another_size_do_not_join_those_that_are_there(request_):
    """Nine pages are three shards of three as well as of four."""
    for i in range(5, 9):
        write_jsonl_texts(request_.folder.parent / "src" / f"{i}.jsonl", texts(20, str(i)))
    num_bytes = sum(path.stat().st_size for path in (request_.folder.parent / "src").iterdir())
    first = replace(request_, shard_bytes=num_bytes // 3 + 9)
    assert len(tokenize(first, lambda line: None).shards) == 3
    with pytest.raises(UserError, match=r"begun with another size of shards \(3, now 4\)"):
        tokenize(replace(request_, shard_bytes=num_bytes * 4 // 9 + 9), lambda line: None)


@pytest.mark.parametrize("content", [b'{"name": ', b"\xff", b"[]", b'{"name": 1}'])
def test_a_damaged_record_is_made_again(request_, content):
    whole = tokenize(request_, lambda line: None)
    (request_.folder / "shard-00001.json").write_bytes(content)
    assert tokenize(request_, lambda line: None) == whole


def test_compressed_files_give_the_shards_of_plain_ones(request_, tmp_path):
    (tmp_path / "packed").mkdir()
    for path in (tmp_path / "src").iterdir():
        (tmp_path / "packed" / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    source = TextFilesSource(path=str(tmp_path / "packed"), block_kib=1)
    packed = tokenize(TokenizeRequest(source, tmp_path / "b", None, 1, 1), lambda line: None)
    assert packed.shards == tokenize(request_, lambda line: None).shards


def test_a_shard_that_was_lost_is_made_again(request_):
    whole = tokenize(request_, lambda line: None)
    tokens_path(request_.folder, "shard-00003").unlink()
    assert tokenize(request_, lambda line: None) == whole
    assert tokens_path(request_.folder, "shard-00003").exists()


def test_a_full_disk_ends_in_words_and_what_is_finished_stays(request_):
    whole = tokenize(request_, lambda line: None)
    for name in ("shard-00003.json", MANIFEST):
        (request_.folder / name).unlink()
    full = request_.folder / "shard-00003.tokens.partial"
    full.symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"DST='.*out' cannot be written \(No space left on device"):
        tokenize(request_, lambda line: None)
    assert not (request_.folder / MANIFEST).exists()
    full.unlink()
    lines = []
    assert tokenize(request_, lines.append) == whole
    assert lines[0] == "4 of 5 shards are there already"


def test_a_process_that_is_killed_is_told_in_words(request_, monkeypatch):
    monkeypatch.setattr(writer, "_start_worker", die)
    with pytest.raises(UserError, match=r"--workers 2: one of the processes was killed"):
        tokenize(replace(request_, num_workers=2), lambda line: None)


def test_shards_inside_the_text_are_refused(request_, tmp_path):
    for folder in (tmp_path / "src", tmp_path / "src" / "shards" / "new"):
        with pytest.raises(UserError, match=r"DST='.*' lies inside SRC='.*src'"):
            tokenize(replace(request_, folder=folder), lambda line: None)
    assert not (tmp_path / "src" / "shards").exists()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_processes_write_the_same(tmp_path):
    path = write_jsonl_texts(tmp_path / "a.jsonl", texts(300, length=2000))
    source = TextFilesSource(path=str(path), block_kib=1)
    for folder, num_workers in (("alone", 1), ("together", 2)):
        request = TokenizeRequest(source, tmp_path / folder, None, num_workers, 1)
        assert len(tokenize(request, lambda line: None).shards) > 1
    assert contents(tmp_path / "together") == contents(tmp_path / "alone")


def test_a_folder_of_something_else_is_refused(request_, tmp_path):
    tokenize(request_, lambda line: None)
    write_jsonl_texts(tmp_path / "src" / "9.jsonl", texts(3))
    with pytest.raises(UserError, match=r"DST='.*out' was begun with another source"):
        tokenize(request_, lambda line: None)
    other = tmp_path / "other"
    other.mkdir()
    (other / "letter.txt").touch()
    with pytest.raises(UserError, match=r"DST='.*other' is not empty and holds no token shards"):
        tokenize(TokenizeRequest(request_.source, other, None, 1, 1), lambda line: None)


@pytest.mark.parametrize(("num_ids", "dtype"), [(1 << 16, "<u2"), ((1 << 16) + 1, "<u4")])
def test_ids_keep_their_value_however_many_there_are(tmp_path, num_ids, dtype):
    words = {f"w{i}": i for i in range(num_ids - 1)} | {"<eos>": num_ids - 1}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    write_jsonl_texts(tmp_path / "a.jsonl", [f"w{num_ids - 2} w1"])
    source = TextFilesSource(path=str(tmp_path / "a.jsonl"))
    request = TokenizeRequest(source, tmp_path / "out", str(tmp_path / "tokenizer"), 1, 1)
    manifest = tokenize(request, lambda line: None)
    assert manifest.dtype == dtype
    (document,) = TokenPages(request.folder, manifest, Shuffle(None)).page(0, (0,)).documents
    assert document.tolist() == [num_ids - 2, 1, num_ids - 1]


def test_the_tokenizer_lies_beside_the_shards(request_):
    tokenize(request_, lambda line: None)
    assert json.loads((request_.folder / "tokenizer" / "tokenizer_config.json").read_text())
