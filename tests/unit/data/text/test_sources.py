import os

import pytest

from tests.support.texts import pretrain_data, texts, write_jsonl_texts, write_parquet_texts
from trainer.config.pretrain import PretrainDataConfig, TextFilesSource
from trainer.data.text.pages import Shuffle
from trainer.data.text.sources import open_files, source_names, stdlib_files
from trainer.errors import UserError


def test_the_standard_library_is_found_without_tests_and_packages():
    files = stdlib_files()
    names = {path.name for path in files}
    assert {"argparse.py", "typing.py"} <= names
    parts = {part for path in files for part in path.parts}
    assert parts.isdisjoint({"site-packages", "test", "__pycache__"})


def test_only_files_of_the_suffixes_asked_for_are_read(tmp_path):
    for name in ("a.py", "b.txt", "c.md"):
        (tmp_path / name).write_text(name)
    source = TextFilesSource(path=str(tmp_path), suffixes=(".py", ".md"))
    page = open_files(source, "data.source", Shuffle(None)).page(0, (0,))
    assert list(page.documents) == ["a.py", "c.md"]


@pytest.mark.parametrize("content", [None, "empty", "other"])
def test_a_source_without_text_is_refused(tmp_path, content):
    folder = tmp_path / "corpus"
    if content is not None:
        folder.mkdir()
        (folder / f"a.{'txt' if content == 'empty' else 'md'}").touch()
    rule = "does not exist" if content is None else r"has no text in files that end in \.txt"
    with pytest.raises(UserError, match=rf"data\.source\.path='.*corpus' {rule}"):
        pretrain_data({"type": "files", "path": str(folder)})


def test_two_kinds_of_files_in_one_source_are_refused(tmp_path):
    write_jsonl_texts(tmp_path / "a.jsonl", texts(2))
    write_parquet_texts(tmp_path / "b.parquet", texts(2))
    with pytest.raises(UserError, match="holds Parquet and plain files: choose one kind"):
        pretrain_data({"type": "files", "path": str(tmp_path)})
    (tmp_path / "b.parquet").rename(tmp_path / "b.txt.gz")
    with pytest.raises(UserError, match="holds compressed and plain files: choose one kind"):
        pretrain_data({"type": "files", "path": str(tmp_path)})


@pytest.mark.parametrize("name", ["a.jsonl.xz", "a.tar.gz", "a.txt.BZ2", "a.parquet.gz", "a.zip"])
def test_a_packing_that_is_not_read_is_refused_by_name(tmp_path, name):
    (tmp_path / name).write_bytes(b"packed")
    for path in (tmp_path, tmp_path / name):
        source = {"type": "files", "path": str(path), "suffixes": [name[1:]]}
        with pytest.raises(UserError, match=rf"data\.source: .*{name} is packed in a way that is"):
            pretrain_data(source)


def test_a_file_whose_name_is_no_text_is_read(tmp_path):
    path = tmp_path / (os.fsdecode(b"\xff") + " ünïcödé.txt")
    path.write_text("some text")
    pages = open_files(TextFilesSource(path=str(tmp_path)), "data.source", Shuffle(None))
    assert pages.identity["files"] == 1


def test_sources_are_named_by_what_they_are():
    sources = [
        {"type": "files", "path": "corpus/books.jsonl"},
        {"type": "files", "path": "other/books.jsonl"},
        {"type": "hub", "path": "allenai/c4"},
        {"type": "stdlib"},
        {"type": "files", "path": "mean.txt"},
        {"type": "tokens", "path": "shards/web/", "name": "the web"},
    ]
    data = PretrainDataConfig.model_validate({"source": {"type": "mix", "sources": sources}})
    assert source_names(data.source) == ["books-0", "books-1", "c4", "stdlib", "mean-4", "the web"]


def test_no_two_sources_have_one_name():
    names = ["mean-1", "mean", "a", "a", "a-3", "a-2-2"]
    sources = [{"type": "stdlib", "name": name} for name in names]
    data = PretrainDataConfig.model_validate({"source": {"type": "mix", "sources": sources}})
    given = source_names(data.source)
    assert len(set(given)) == len(names)
    assert [given[i] for i in (0, 4, 5)] == ["mean-1", "a-3", "a-2-2"], "kept, being unique"


def test_a_part_of_a_mix_is_named_by_its_place(tmp_path):
    write_jsonl_texts(tmp_path / "a.jsonl", texts(2))
    (tmp_path / "b.jsonl").write_text('{"body": "x"}\n')
    parts = [{"type": "files", "path": str(tmp_path / f"{name}.jsonl")} for name in "ab"]
    stream = pretrain_data({"type": "mix", "sources": parts}).train
    with pytest.raises(UserError, match=r"b\.jsonl.* in data\.source\.sources\[1\]\.column"):
        stream.next_packs(4)
    val = {"source": {"type": "mix", "sources": parts}}
    with pytest.raises(UserError, match=r"val\.source\.sources\[1\]\.on_bad_row='skip'"):
        pretrain_data(parts[0], val=val)
