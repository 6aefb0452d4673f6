import pytest

from tests.support.texts import texts, write_parquet_texts
from tests.unit.data.text.test_files import all_documents
from trainer.config.pretrain import HubTextSource
from trainer.data.text import hub
from trainer.data.text.hub import StreamPages, TablePages, open_hub
from trainer.data.text.pages import Shuffle
from trainer.errors import UserError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "PAGE_ROWS", 5)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    for i in range(3):
        write_parquet_texts(tmp_path / "set" / f"train-{i}.parquet", texts(12, str(i)))
    return tmp_path / "set"


EXPECTED = texts(12, "0") + texts(12, "1") + texts(12, "2")


@pytest.mark.parametrize(("streaming", "kind"), [(False, TablePages), (True, StreamPages)])
def test_every_row_is_read_once_an_epoch(folder, streaming, kind):
    source = HubTextSource(path=str(folder), streaming=streaming)
    pages = open_hub(source, "data.source", Shuffle("0"))
    assert isinstance(pages, kind)
    first, second = all_documents(pages), all_documents(pages, epoch=1)
    assert all_documents(open_hub(source, "data.source", Shuffle(None))) == EXPECTED
    assert first not in (second, EXPECTED)
    assert sorted(first) == sorted(second) == sorted(EXPECTED)


def test_a_stream_goes_on_from_any_cursor(folder):
    source = HubTextSource(path=str(folder), streaming=True)
    pages = open_hub(source, "data.source", Shuffle("0"))
    cursor = (0,)
    while cursor is not None:
        page = pages.page(0, cursor)
        again = open_hub(source, "data.source", Shuffle("0")).page(0, cursor)
        assert list(again.documents) == list(page.documents)
        assert again.following == page.following
        cursor = page.following
    assert [pages.fraction(c) for c in ((0,), (1, 5), (2, 0))] == [0, 1 / 3, 2 / 3]


def test_what_cannot_be_loaded_is_named(folder):
    for column in ("body", "id"):
        with pytest.raises(UserError, match=rf"data\.source\.column='{column}'.*text, id"):
            open_hub(HubTextSource(path=str(folder), column=column), "data.source", Shuffle(None))
    with pytest.raises(UserError, match=r"data\.source\.path='.*nothing'.*cannot be loaded"):
        open_hub(HubTextSource(path=str(folder / "nothing")), "data.source", Shuffle(None))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"te\n', r"(cannot be loaded|cannot be read).*JSON parse error"),
        (b'{"text": "\xff"}\n', "file of the data set cannot be read .'utf-8' codec"),
        (b"", "data.source.path='.*set' has no rows"),
    ],
    ids=["no JSON", "no UTF-8", "empty"],
)
def test_a_damaged_file_is_a_users_error(tmp_path, monkeypatch, content, message, streaming):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.jsonl").write_bytes(content)
    source = HubTextSource(path=str(tmp_path / "set"), streaming=streaming)
    with pytest.raises(UserError, match=message):
        open_hub(source, "data.source", Shuffle(None)).page(0, (0,))


def test_a_stream_that_does_not_say_its_columns_is_checked_row_by_row():
    import datasets

    rows = [{"text": "a"}, {"text": None}, {"body": "b"}]
    stream = datasets.IterableDataset.from_generator(lambda: iter(rows))
    good = StreamPages(stream.take(2), "text", Shuffle(None))
    assert list(good.page(0, (0,)).documents) == ["a"]
    with pytest.raises(UserError, match=r"a row of the stream has no text there \(found body"):
        StreamPages(stream, "text", Shuffle(None)).page(0, (0,))
