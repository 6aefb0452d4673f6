import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pytest

from tests.support.texts import pack_ids, pretrain_data, texts, write_jsonl_texts
from tests.unit.data.text.test_files import all_documents
from trainer.data.text import compressed, files
from trainer.data.text.blocks import TextFormat
from trainer.data.text.compressed import CompressedPages
from trainer.data.text.files import FileBlocks, FilePages
from trainer.data.text.pages import Shuffle
from trainer.errors import UserError


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    monkeypatch.setattr(files, "PAGE_BLOCKS", 3)


def pack(path: Path, content: bytes) -> Path:
    """Write content as the path's suffix says; two parts, as parallel packers write them."""
    middle = len(content) // 2
    parts = [content[:middle], content[middle:]]
    if path.suffix == ".gz":
        path.write_bytes(b"".join(map(gzip.compress, parts)))
        return path
    with path.open("wb") as file:
        for part in parts:
            sink = pyarrow.BufferOutputStream()
            with pyarrow.CompressedOutputStream(sink, "zstd") as packed:
                packed.write(part)
            file.write(sink.getvalue())
    return path


CONTENTS = {
    "rows.jsonl": "".join(json.dumps({"text": t}) + "\n" for t in [*texts(60), "long " * 300, "é"]),
    "lines.txt": "".join(f"line {i} ✓ {'x' * (i % 40)}\n" for i in range(80)) + "no end",
    "one_line.txt": "日本語 é🦊" * 100,
    "blank_lines.txt": "\n" * 500 + "words",
    "empty.txt": "",
}


@pytest.mark.parametrize("packing", [".gz", ".zst"])
@pytest.mark.parametrize("block_bytes", [5, 30, 64, 10_000])
@pytest.mark.parametrize("name", CONTENTS)
def test_documents_are_those_of_the_unpacked_file(tmp_path, packing, block_bytes, name):
    plain = tmp_path / name
    plain.write_text(CONTENTS[name], encoding="utf-8")
    packed = pack(tmp_path / (name + packing), plain.read_bytes())
    blocks = FileBlocks([plain], block_bytes)
    expected = FilePages(blocks, TextFormat(), Shuffle(None)) if len(blocks) else None
    pages = CompressedPages([packed], block_bytes, TextFormat(), Shuffle(None))
    assert all_documents(pages) == (all_documents(expected) if expected else [])


@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_any_cursor_is_reached_alone_and_every_epoch_gives_all(tmp_path, packing):
    paths = [
        pack(tmp_path / f"{i}.jsonl{packing}", write_jsonl_texts(tmp_path / "rows", t).read_bytes())
        for i, t in enumerate([texts(40, "a"), texts(30, "b"), texts(1, "c")])
    ]

    def fresh():
        return CompressedPages(paths, 50, TextFormat(), Shuffle("0"))

    pages, cursor, cursors = fresh(), (0,), []
    while cursor is not None:
        page, again = pages.page(0, cursor), fresh().page(0, cursor)
        assert (list(page.documents), page.following) == (list(again.documents), again.following)
        cursors.append(cursor)
        cursor = page.following
    assert list(pages.page(0, cursors[3]).documents) == list(fresh().page(0, cursors[3]).documents)
    first, second = all_documents(pages), all_documents(pages, epoch=1)
    assert first != second
    assert (
        sorted(first) == sorted(second) == sorted(texts(40, "a") + texts(30, "b") + texts(1, "c"))
    )


def test_opening_reads_no_file(tmp_path, monkeypatch):
    path = pack(tmp_path / "a.jsonl.gz", b'{"text": "a"}\n')
    monkeypatch.setattr("gzip.open", lambda *args: pytest.fail("a file was opened"))
    assert CompressedPages([path], 64, TextFormat(), Shuffle("0")).num_pages == 1


@pytest.mark.parametrize("packing", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "other", "gone"])
def test_a_damaged_file_is_named(tmp_path, packing, damage):
    path = pack(tmp_path / f"a.txt{packing}", b"some text\n" * 99)
    pages = CompressedPages([path], 64, TextFormat(), Shuffle(None))
    match damage:
        case "cut":
            path.write_bytes(path.read_bytes()[:-9])
        case "other":
            path.write_bytes(b"no packed text")
        case "gone":
            path.unlink()
    with pytest.raises(UserError, match=r"/a\.txt\.(gz|zst) cannot be unpacked"):
        all_documents(pages)


def test_zstd_is_refused_by_name_where_pyarrow_lacks_it(tmp_path, monkeypatch):
    path = pack(tmp_path / "a.txt.zst", b"text")
    without = SimpleNamespace(Codec=SimpleNamespace(is_available=lambda name: False))
    monkeypatch.setattr(compressed, "pyarrow", without)
    with pytest.raises(UserError, match=r"a\.txt\.zst is packed with zstd, which the installed"):
        all_documents(CompressedPages([path], 64, TextFormat(), Shuffle(None)))


@pytest.mark.parametrize("num_taken", [1, 4, 9])
def test_a_stream_goes_on_where_it_was(tmp_path, num_taken):
    for i in range(3):
        rows = write_jsonl_texts(tmp_path / "rows", texts(50, str(i)))
        pack(tmp_path / f"{i}.jsonl.gz", rows.read_bytes())
    source = {"type": "files", "path": str(tmp_path), "block_kib": 1}
    stream = pretrain_data(source, pack_lookahead=5).train
    stream.next_packs(num_taken)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = pretrain_data(source, pack_lookahead=5).train
    resumed.load_state_dict(state)
    assert pack_ids(resumed.next_packs(40)) == pack_ids(stream.next_packs(40))
