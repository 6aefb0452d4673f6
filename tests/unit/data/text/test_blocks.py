import io
import json
import os
from pathlib import Path

import pytest

from tests.support.texts import texts, write_jsonl_texts
from trainer.data.text import blocks
from trainer.data.text.blocks import Block, LongLines, SkippedRows, TextFormat, block_texts
from trainer.data.text.files import FileBlocks, FilePages
from trainer.data.text.pages import Shuffle
from trainer.errors import UserError


def read_all(path: Path, block_bytes: int = 1000, skipped: SkippedRows | None = None) -> list[str]:
    """Return the documents of a file, block by block as they lie."""
    pages = FilePages(FileBlocks([path], block_bytes), TextFormat(skipped=skipped), Shuffle(None))
    return [text for i in range(pages.num_pages) for text in pages.page(0, (i,)).documents]


@pytest.mark.parametrize("block_bytes", [1, 7, 30, 64, 10_000])
def test_every_row_is_read_once_whatever_the_block_size(tmp_path, block_bytes):
    documents = [*texts(40), "ünïcödé ✓ 🦊", "two\nlines"]
    path = write_jsonl_texts(tmp_path / "a.jsonl", documents)
    read = read_all(path, block_bytes)
    assert read == documents


@pytest.mark.parametrize("block_bytes", [32, 64, 10_000])
def test_plain_text_is_cut_at_line_ends_and_nothing_is_lost(tmp_path, block_bytes):
    content = "".join(f"line {i} ✓\n" for i in range(50)) + "no newline at the end"
    path = tmp_path / "a.txt"
    path.write_text(content, encoding="utf-8")
    read = read_all(path, block_bytes)
    assert "".join(read) == content
    assert all(text.endswith("\n") for text in read[:-1])


@pytest.mark.parametrize("block_bytes", [5, 64])
def test_text_without_line_ends_is_cut_between_characters(tmp_path, block_bytes):
    content = "日本語 é🦊" * 40
    path = tmp_path / "a.txt"
    path.write_text(content, encoding="utf-8")
    read = read_all(path, block_bytes)
    assert "".join(read) == content
    assert max(len(text.encode()) for text in read) <= block_bytes + 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line at byte 14 is not JSON"),
        ('{"body": "x"}', r"row at byte 14 has no text in 'text' \(found the fields body\)"),
        ('{"text": 3}', "row at byte 14 has no text in 'text' .found a int there"),
        ("[]", "row at byte 14 has no text in 'text' .found a list"),
        ('{"text": "\\ud800"}', "row at byte 14 has half a surrogate pair at character 0"),
        ('{"id": ' + "1" * 5000 + "}", "line at byte 14 is not JSON .Exceeds the limit"),
        ('{"id": ' + "[" * 10**5, "line at byte 14 is not JSON .*recursion"),
        ("\udcff", "line at byte 14 is not JSON .'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_a_bad_row_is_named_by_file_and_byte(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(os.fsencode(json.dumps({"text": "a"}) + "\n" + line + "\n"))
    with pytest.raises(UserError, match=rf"{message}.* set data\.source\.on_bad_row='skip'"):
        read_all(path)
    assert read_all(path, skipped=SkippedRows()) == ["a"]


def test_bad_rows_are_left_out_and_logged_when_asked(tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{\n{"text": 3}\n{"text": "b"}\n')
    assert read_all(path, skipped=SkippedRows()) == ["a", "b"]
    assert [message.partition(": the ")[2][:15] for message in caplog.messages] == [
        "line at byte 14",
        "row at byte 16 ",
    ]


def test_few_of_many_bad_rows_are_logged(tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    path.write_text("{\n" * 1234 + '{"text": "b"}\n')
    assert read_all(path, skipped=SkippedRows()) == ["b"]
    numbers = [int(message.split(":")[0].split()[-1]) for message in caplog.messages]
    assert numbers == [*range(1, 11), 100, 1000]
    assert "on_bad_row" not in caplog.text, "no advice that is already followed"


def test_text_that_is_not_utf8_is_refused_by_byte(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc\xff")
    with pytest.raises(UserError, match=r"a\.txt: byte 3 is not UTF-8"):
        read_all(path)


def test_blank_files_and_lines_are_no_documents(tmp_path):
    (tmp_path / "a.txt").write_text(" \n\n")
    (tmp_path / "b.jsonl").write_text('\n  \n{"text": "x"}\n\n')
    assert [read_all(tmp_path / name) for name in ("a.txt", "b.jsonl")] == [[], ["x"]]


def test_empty_texts_are_no_documents(tmp_path):
    path = write_jsonl_texts(tmp_path / "a.jsonl", ["a", "", "b"])
    assert read_all(path) == ["a", "b"]


def test_a_byte_order_mark_and_carriage_returns_do_not_hide_rows(tmp_path):
    path = tmp_path / "a.JSONL"
    mark = b"\xef\xbb\xbf"
    first, second = b'{"text": "a"}\r\n\r\n', b'{"text": "b\\r\\n"}\r\n'
    path.write_bytes(mark + first + second + mark + first)
    assert read_all(path, 7) == read_all(path) == ["a", "b\r\n", "a"], "also of files in a row"


def test_a_mark_inside_plain_text_is_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\ufeffone\n\ufefftwo\n", encoding="utf-8")
    assert read_all(path, 7) == ["one\n", "\ufefftwo\n"]


class CountingFile(io.BytesIO):
    """Counts the bytes that are read."""

    num_read = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(size)
        self.num_read += len(line)
        return line


def test_a_long_line_is_gone_through_once_whatever_the_order_of_its_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "_CHUNK_BYTES", 100)
    monkeypatch.setattr(blocks, "LONG_LINE_BYTES", 400)
    documents = ["before", "long " * 4000, "behind"]
    content = "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()
    starts = range(0, len(content), 50)
    file, long_lines = CountingFile(content), LongLines()
    shuffled = [starts[Shuffle("0").place(i, len(starts), 0)] for i in range(len(starts))]
    read = {}
    for start in shuffled:
        block = Block(Path("a"), start, min(start + 50, len(content)), 50)
        read[start] = block_texts(file, block, TextFormat(is_jsonl=True), long_lines)
    assert [text for start in starts for text in read[start]] == documents
    assert file.num_read < 4 * len(content), "each of 400 blocks would read half of it"
