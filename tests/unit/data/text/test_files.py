import pytest

from tests.support.texts import texts, write_jsonl_texts
from trainer.data.text.blocks import TextFormat
from trainer.data.text.files import PAGE_BLOCKS, FileBlocks, FilePages
from trainer.data.text.pages import Shuffle
from trainer.errors import UserError


def all_documents(pages, epoch=0):
    cursor, found = (0,), []
    while cursor is not None:
        page = pages.page(epoch, cursor)
        found += list(page.documents)
        cursor = page.following
    return found


def test_opening_reads_no_file(tmp_path, monkeypatch):
    paths = [write_jsonl_texts(tmp_path / f"{i}.jsonl", texts(3)) for i in range(3)]
    monkeypatch.setattr("pathlib.Path.open", lambda *args: pytest.fail("a file was opened"))
    assert FilePages(FileBlocks(paths, 64), TextFormat(), Shuffle("0")).num_pages == 1


def test_an_epoch_gives_every_document_once_in_another_order_each_time(tmp_path):
    documents = texts(3 * PAGE_BLOCKS)
    path = write_jsonl_texts(tmp_path / "a.jsonl", documents)
    pages = FilePages(FileBlocks([path], 32), TextFormat(), Shuffle("0"))
    first, second = all_documents(pages), all_documents(pages, epoch=1)
    assert pages.num_pages > 1
    assert sorted(first) == sorted(documents) == sorted(second)
    assert len({tuple(first), tuple(second), tuple(documents)}) == 3
    assert first == all_documents(FilePages(FileBlocks([path], 32), TextFormat(), Shuffle("0")))
    assert first != all_documents(FilePages(FileBlocks([path], 32), TextFormat(), Shuffle("1")))


def test_unshuffled_documents_come_as_they_lie(tmp_path):
    paths = [write_jsonl_texts(tmp_path / f"{i}.jsonl", texts(9, f"file {i}")) for i in range(2)]
    pages = FilePages(FileBlocks(paths, 50), TextFormat(), Shuffle(None))
    assert all_documents(pages) == texts(9, "file 0") + texts(9, "file 1")


def test_a_file_that_went_away_is_named(tmp_path):
    path = write_jsonl_texts(tmp_path / "a.jsonl", texts(3))
    blocks = FileBlocks([path], 1000)
    path.unlink()
    with pytest.raises(UserError, match=r"a\.jsonl cannot be read \(No such file"):
        FilePages(blocks, TextFormat(), Shuffle(None)).page(0, (0,))
    with pytest.raises(UserError, match=r"a\.jsonl cannot be read \(No such file"):
        FileBlocks([path], 1000)
