import os
from pathlib import Path

import pytest

from tests.support.rows import chat_row, write_jsonl
from tests.support.texts import write_jsonl_texts
from tests.support.unseen import unseen
from trainer.config.data import FilesSource
from trainer.config.pretrain import TextFilesSource
from trainer.data.file_tree import files_under
from trainer.data.sources import open_rows
from trainer.data.text.pages import Shuffle
from trainer.data.text.sources import open_files
from trainer.errors import UserError


def touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def found(folder: Path, *suffixes: str) -> list[str]:
    return [str(path.relative_to(folder)) for path in files_under(folder, suffixes, "data.source")]


def test_a_folders_files_come_before_what_lies_deeper_each_by_name(tmp_path):
    touch(tmp_path, "b.txt", "a/z.txt", "a/y/x.txt", "a-b.txt", "B.TXT", "c.md", "x.txt/i.txt")
    assert found(tmp_path, ".txt") == [
        *("B.TXT", "a-b.txt", "b.txt"),
        *("a/z.txt", "a/y/x.txt"),
        "x.txt/i.txt",
    ]


def test_hidden_files_and_folders_are_passed_over(tmp_path):
    touch(tmp_path, "a.txt", ".b.txt", "._a.txt", ".git/c.txt", "d/.ipynb_checkpoints/e.txt")
    assert found(tmp_path, ".txt") == ["a.txt"]
    touch(tmp_path, ".corpus/a.txt")
    assert found(tmp_path / ".corpus", ".txt") == ["a.txt"], "the folder itself was asked for"


def test_links_are_followed_and_no_folder_is_entered_twice(tmp_path):
    touch(tmp_path, "elsewhere/b.txt", "corpus/a.txt")
    corpus = tmp_path / "corpus"
    (corpus / "file.txt").symlink_to(tmp_path / "elsewhere" / "b.txt")
    (corpus / "folder").symlink_to(tmp_path / "elsewhere")
    (corpus / "loop").symlink_to(corpus)
    assert found(corpus, ".txt") == ["a.txt", "file.txt", "folder/b.txt"]


@pytest.mark.parametrize("kind", ["link", "loop", "pipe"])
def test_what_is_no_file_is_refused_by_name(tmp_path, kind):
    path = tmp_path / "a.txt"
    match kind:
        case "link":
            path.symlink_to(tmp_path / "nowhere")
        case "loop":
            path.symlink_to(path)
        case _:
            os.mkfifo(path)
    with pytest.raises(UserError, match=r"val\.source: .*/a\.txt cannot be read \(it is a broken"):
        files_under(tmp_path, [".txt"], "val.source")
    if kind == "pipe":
        assert found(tmp_path, ".md") == [], "not asked for"


def test_a_link_to_a_folder_that_is_gone_is_refused_whatever_its_name(tmp_path):
    touch(tmp_path, "a.txt")
    (tmp_path / "part2").symlink_to(tmp_path / "unmounted")
    with pytest.raises(UserError, match=r"data\.source: .*/part2 cannot be read \(it is a broken"):
        files_under(tmp_path, [".txt"], "data.source")


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(UserError, match=rf"data\.source: {tmp_path} cannot be read \(Permission"):
        found(tmp_path, ".txt")


def test_rows_and_text_are_found_by_one_rule(tmp_path):
    (tmp_path / "corpus").mkdir()
    for name in ("elsewhere/b.jsonl", "corpus/a.jsonl", "corpus/.c.jsonl"):
        write_jsonl(tmp_path / "rows" / name, [chat_row(name, "a")])
        write_jsonl_texts(tmp_path / "text" / name, [name])
    for kind in ("rows", "text"):
        (tmp_path / kind / "corpus" / "link").symlink_to(tmp_path / kind / "elsewhere")
    rows = open_rows(FilesSource(path=str(tmp_path / "rows" / "corpus")), "data.source")
    questions = [rows[i]["messages"][0]["content"] for i in range(len(rows))]
    source = TextFilesSource(path=str(tmp_path / "text" / "corpus"))
    texts = list(open_files(source, "data.source", Shuffle(None)).page(0, (0,)).documents)
    assert questions == texts == ["corpus/a.jsonl", "elsewhere/b.jsonl"]


def test_a_source_that_this_user_may_not_see_is_named(tmp_path):
    path = str(tmp_path / "closed" / "rows.jsonl")
    message = rf"data\.source\.path='{path}' cannot be looked at \(Permission denied\)"
    with unseen(tmp_path / "closed"):
        with pytest.raises(UserError, match=message):
            open_rows(FilesSource(path=path), "data.source")
        with pytest.raises(UserError, match=message):
            open_files(TextFilesSource(path=path), "data.source", Shuffle(None))
