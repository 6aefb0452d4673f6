import pyarrow
import pyarrow.parquet
import pytest

from tests.support.texts import texts, write_parquet_texts
from tests.unit.data.text.test_files import all_documents
from trainer.data.text import parquet
from trainer.data.text.pages import Shuffle
from trainer.data.text.parquet import ParquetPages
from trainer.errors import UserError


def test_every_row_is_read_once_an_epoch(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "PAGE_BYTES", 200)
    paths = [write_parquet_texts(tmp_path / f"{i}.parquet", texts(18, str(i))) for i in range(2)]
    expected = texts(18, "0") + texts(18, "1")
    pages = ParquetPages(paths, "text", Shuffle("0"))
    assert pages.num_pages > 1
    assert all_documents(ParquetPages(paths, "text", Shuffle(None))) == expected
    first, second = all_documents(pages), all_documents(pages, epoch=1)
    assert first != expected
    assert first != second
    assert sorted(first) == sorted(second) == sorted(expected)


def test_opening_reads_footers_only(tmp_path, monkeypatch):
    path = write_parquet_texts(tmp_path / "a.parquet", texts(9))
    monkeypatch.setattr(
        "pyarrow.parquet.ParquetFile.read_row_group", lambda *args, **kw: pytest.fail("rows read")
    )
    assert len(ParquetPages([path], "text", Shuffle("0")).groups) == 3


def test_a_missing_column_and_a_damaged_file_are_named(tmp_path):
    path = write_parquet_texts(tmp_path / "a.parquet", texts(4))
    for column in ("body", "id"):
        with pytest.raises(UserError, match=rf"a\.parquet needs one text column '{column}' \(its"):
            ParquetPages([path], column, Shuffle(None))
    with pytest.raises(UserError, match=r"columns are text \(string\), id \(int64\)\).* --column$"):
        ParquetPages([path], "body", Shuffle(None), "SRC")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"a\.parquet is not a readable Parquet file"):
        ParquetPages([path], "text", Shuffle(None))


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"needs one text column 'text' \(its columns are text"):
        ParquetPages([tmp_path / "a.parquet"], "text", Shuffle(None))


@pytest.mark.parametrize("kind", ["dictionary", "large_string", "string_view"])
def test_text_is_read_in_every_form_that_arrow_has(tmp_path, kind):
    column = pyarrow.array(["a", None, "b", "", "a"])
    types = {"large_string": pyarrow.large_string(), "string_view": pyarrow.string_view()}
    column = column.cast(types[kind]) if kind in types else column.dictionary_encode()
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a", row_group_size=2)
    assert all_documents(ParquetPages([tmp_path / "a"], "text", Shuffle(None))) == ["a", "b", "a"]


def test_text_that_is_not_utf8_is_named_by_file(tmp_path):
    column = pyarrow.array([b"a", b"\xff"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    pages = ParquetPages([tmp_path / "a.parquet"], "text", Shuffle(None))
    with pytest.raises(UserError, match=r"a\.parquet is not a readable Parquet file .*utf-8"):
        pages.page(0, (0,))
