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
    with pytest.raises(UserError, match="holds Parquet files and others"):
        pretrain_data({"type": "files", "path": str(tmp_path)})


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
