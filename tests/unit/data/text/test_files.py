import json

import pytest

from tests.support.texts import texts, write_jsonl_texts
from trainer.data.text.files import PAGE_BLOCKS, FileBlocks, FilePages, JsonlRows, read_block
from trainer.data.text.pages import Shuffle
from trainer.errors import UserError


def all_documents(pages, epoch=0):
    cursor, found = (0,), []
    while cursor is not None:
        page = pages.page(epoch, cursor)
        found += list(page.documents)
        cursor = page.following
    return found


@pytest.mark.parametrize("block_bytes", [1, 7, 30, 64, 10_000])
def test_every_row_is_read_once_whatever_the_block_size(tmp_path, block_bytes):
    documents = [*texts(40), "ünïcödé ✓ 🦊", "two\nlines"]
    path = write_jsonl_texts(tmp_path / "a.jsonl", documents)
    blocks = FileBlocks([path], block_bytes)
    read = [text for i in range(len(blocks)) for text in read_block(blocks[i], JsonlRows())]
    assert read == documents


@pytest.mark.parametrize("block_bytes", [32, 64, 10_000])
def test_plain_text_is_cut_at_line_ends_and_nothing_is_lost(tmp_path, block_bytes):
    content = "".join(f"line {i} ✓\n" for i in range(50)) + "no newline at the end"
    path = tmp_path / "a.txt"
    path.write_text(content, encoding="utf-8")
    blocks = FileBlocks([path], block_bytes)
    read = [text for i in range(len(blocks)) for text in read_block(blocks[i], JsonlRows())]
    assert "".join(read) == content
    assert all(text.endswith("\n") for text in read[:-1])


@pytest.mark.parametrize("block_bytes", [5, 64])
def test_text_without_line_ends_is_cut_between_characters(tmp_path, block_bytes):
    content = "日本語 é🦊" * 40
    path = tmp_path / "a.txt"
    path.write_text(content, encoding="utf-8")
    blocks = FileBlocks([path], block_bytes)
    read = [text for i in range(len(blocks)) for text in read_block(blocks[i], JsonlRows())]
    assert "".join(read) == content
    assert max(len(text.encode()) for text in read) <= block_bytes + 3


def test_opening_reads_no_file(tmp_path, monkeypatch):
    paths = [write_jsonl_texts(tmp_path / f"{i}.jsonl", texts(3)) for i in range(3)]
    monkeypatch.setattr("pathlib.Path.open", lambda *args: pytest.fail("a file was opened"))
    assert FilePages(FileBlocks(paths, 64), JsonlRows(), Shuffle("0")).num_pages == 1


def test_an_epoch_gives_every_document_once_in_another_order_each_time(tmp_path):
    documents = texts(3 * PAGE_BLOCKS)
    path = write_jsonl_texts(tmp_path / "a.jsonl", documents)
    pages = FilePages(FileBlocks([path], 32), JsonlRows(), Shuffle("0"))
    first, second = all_documents(pages), all_documents(pages, epoch=1)
    assert pages.num_pages > 1
    assert sorted(first) == sorted(documents) == sorted(second)
    assert len({tuple(first), tuple(second), tuple(documents)}) == 3
    assert first == all_documents(FilePages(FileBlocks([path], 32), JsonlRows(), Shuffle("0")))
    assert first != all_documents(FilePages(FileBlocks([path], 32), JsonlRows(), Shuffle("1")))


def test_unshuffled_documents_come_as_they_lie(tmp_path):
    paths = [write_jsonl_texts(tmp_path / f"{i}.jsonl", texts(9, f"file {i}")) for i in range(2)]
    pages = FilePages(FileBlocks(paths, 50), JsonlRows(), Shuffle(None))
    assert all_documents(pages) == texts(9, "file 0") + texts(9, "file 1")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line at byte 14 is not JSON"),
        ('{"body": "x"}', r"row at byte 14 has no text in 'text' \(found \['body'\]\)"),
        ('{"text": 3}', "row at byte 14 has no text in 'text'"),
        ("[]", "row at byte 14 has no text in 'text' .found list"),
    ],
)
def test_a_bad_row_is_named_by_file_and_byte(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "a"}) + "\n" + line + "\n")
    with pytest.raises(UserError, match=message):
        read_block(FileBlocks([path], 1000)[0], JsonlRows())


def test_bad_rows_are_left_out_and_logged_when_asked(tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{\n{"text": 3}\n{"text": "b"}\n')
    blocks = FileBlocks([path], 1000)
    assert read_block(blocks[0], JsonlRows(skips_bad=True)) == ["a", "b"]
    assert [message.partition(": the ")[2][:15] for message in caplog.messages] == [
        "line at byte 14",
        "row at byte 16 ",
    ]


def test_text_that_is_not_utf8_is_refused_by_byte(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc\xff")
    with pytest.raises(UserError, match=r"a\.txt: byte 3 is not UTF-8"):
        read_block(FileBlocks([path], 1000)[0], JsonlRows())


def test_blank_files_and_lines_are_no_documents(tmp_path):
    (tmp_path / "a.txt").write_text(" \n\n")
    (tmp_path / "b.jsonl").write_text('\n  \n{"text": "x"}\n\n')
    blocks = FileBlocks([tmp_path / "a.txt", tmp_path / "b.jsonl"], 1000)
    assert [read_block(blocks[i], JsonlRows()) for i in range(2)] == [[], ["x"]]


def test_a_file_that_went_away_is_named(tmp_path):
    path = write_jsonl_texts(tmp_path / "a.jsonl", texts(3))
    blocks = FileBlocks([path], 1000)
    path.unlink()
    with pytest.raises(UserError, match=r"a\.jsonl cannot be read \(No such file"):
        read_block(blocks[0], JsonlRows())
    with pytest.raises(UserError, match=r"a\.jsonl cannot be read \(No such file"):
        FileBlocks([path], 1000)
