from pathlib import Path

import pytest

import trainer.data.jsonl as jsonl
from trainer.data.jsonl import JsonLines
from trainer.data.rows import BadRow


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize("end", ["", "\n", "\n\n", "\r\n"])
def test_rows_are_the_lines_with_content(tmp_path: Path, end: str) -> None:
    lines = JsonLines(write(tmp_path / "a.jsonl", '{"a": 1}\n\n{"a": "é\u2028"}' + end))
    assert [row["a"] for row in lines] == [1, "é\u2028"]
    assert lines.where(1) == f"{tmp_path}/a.jsonl:3"


def test_lines_of_white_space_are_no_rows(tmp_path: Path) -> None:
    lines = JsonLines(
        write(tmp_path / "a.jsonl", '  \n{"a": 1}\n\t \r\n' + " " * 99 + '\n {"a": 2}')
    )
    assert [row["a"] for row in lines] == [1, 2]
    assert lines.where(1) == f"{tmp_path}/a.jsonl:5"


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    assert len(JsonLines(write(tmp_path / "a.jsonl", ""))) == 0


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    assert JsonLines(write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"a": 1}'))[0] == {"a": 1}


def test_lines_across_chunks_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "_CHUNK_BYTES", 7)
    content = "".join(f'{{"a": {i}}}\n' for i in range(100))
    assert [row["a"] for row in JsonLines(write(tmp_path / "a.jsonl", content))] == list(range(100))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"a": ', "not JSON"),
        (b'{"a": "\xff"}', "not JSON"),
        (b"[1, 2]", "holds a list"),
        (b"[" * 100_000 + b"]" * 100_000, "not JSON .*recursion"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not JSON .*digits"),
        (b"x", "not JSON"),
    ],
    ids=["half a line", "no UTF-8", "no object", "deep", "thousands of digits", "one letter"],
)
def test_a_corrupt_line_is_a_bad_row(tmp_path: Path, line: bytes, message: str) -> None:
    lines = JsonLines(write(tmp_path / "a.jsonl", b'{"a": 1}\n' + line + b"\n"))
    assert lines[0] == {"a": 1}
    with pytest.raises(BadRow, match=message) as caught:
        lines[1]
    assert caught.value.reason == "not_json"
