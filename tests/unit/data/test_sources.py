from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.support.rows import chat_row, write_jsonl
from trainer.config.data import FilesSource, HubSource, MixSource, ReasoningGymSource
from trainer.data.rows import BadRow
from trainer.data.sources import ChainedRows, SplitRows, open_rows, open_sources
from trainer.errors import UserError

CALL = {"name": "f", "arguments": {"x": 1}}
ROWS = [chat_row(f"q{i}", "a") for i in range(4)]
ROWS[3]["messages"][1]["tool_calls"] = [CALL]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_a_folder_gives_all_its_files_in_order_of_their_names(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows/b.jsonl", ROWS[:1])
    write_jsonl(tmp_path / "rows/d/x.jsonl", ROWS[1:3])
    (tmp_path / "rows/e").mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[3:]), tmp_path / "rows/e/c.parquet")
    (tmp_path / "rows/README.md").write_text("not data")
    rows = open_rows(FilesSource(path=str(tmp_path / "rows")), "data.source")
    assert [rows[i] for i in range(len(rows))] == ROWS
    assert rows.where(2) == f"{tmp_path}/rows/d/x.jsonl:2"
    assert rows.where(3) == f"{tmp_path}/rows/e/c.parquet: row 1"


def test_parquet_rows_lose_the_nulls_that_arrow_adds(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    rows = open_rows(FilesSource(path=str(path)), "data.source")
    assert [rows[i] for i in range(4)] == ROWS


def test_text_that_is_not_utf8_makes_a_bad_row(tmp_path: Path) -> None:
    prompts = pyarrow.array([b"a", b"\xff"]).view(pyarrow.string())
    table = pyarrow.table({"prompt": prompts, "completion": ["x", "y"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    rows = open_rows(FilesSource(path=str(tmp_path / "a.parquet")), "data.source")
    assert rows[0] == {"prompt": "a", "completion": "x"}
    with pytest.raises(BadRow, match=r"its text is not UTF-8 .*0xff"):
        rows[1]


def test_a_hub_data_set_is_read_by_name(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "set/train.jsonl", ROWS[:3])
    rows = open_rows(HubSource(name=str(tmp_path / "set")), "data.source")
    assert [rows[i] for i in range(len(rows))] == ROWS[:3]
    assert rows.where(0) == f"{tmp_path}/set[train]: row 1"


def test_subset_and_split_of_a_hub_data_set_are_asked_for(monkeypatch) -> None:
    asked = []

    def load(*names: str | None, split: str) -> list[dict]:
        asked.append((*names, split))
        return ROWS

    monkeypatch.setattr("datasets.load_dataset", load)
    rows = open_rows(HubSource(name="set", subset="easy", split="test"), "data.source")
    assert asked == [("set", "easy", "test")]
    assert rows.where(1) == "set[test]: row 2"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (FilesSource(path="/nowhere"), r"data\.source\.path='/nowhere' does not exist"),
        (HubSource(name="/nowhere"), r"data\.source\.name='/nowhere' .* cannot be loaded"),
        (
            ReasoningGymSource(task="spell_backwards", size=1),
            r"data\.source\.task='spell_backwards' .* did you mean spell_backward",
        ),
        (
            ReasoningGymSource(task="spell_backward", size=1, params={"max_len": 3}),
            r"data\.source\.params=\{'max_len': 3\}",
        ),
        (
            ReasoningGymSource(task="spell_backward", size=1, params={"min_word_len": 0}),
            r"data\.source\.params=\{'min_word_len': 0\}",
        ),
    ],
    ids=["files", "hub", "task", "params", "value"],
)
def test_a_source_that_cannot_be_opened_is_named(source, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_rows(source, "data.source")


def test_an_empty_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(UserError, match=r"data\.source\.path='.*a\.jsonl' has no rows"):
        open_rows(FilesSource(path=str(tmp_path / "a.jsonl")), "data.source")


def test_a_folder_without_data_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(UserError, match=r"holds no such file: give a \.jsonl or \.parquet"):
        open_rows(FilesSource(path=str(tmp_path)), "data.source")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(UserError, match=r"a\.csv' is of another kind"):
        open_rows(FilesSource(path=str(tmp_path / "a.csv")), "data.source")


def test_a_part_of_a_mix_is_named_by_its_place() -> None:
    good = ReasoningGymSource(task="spell_backward", size=1)
    mix = MixSource(sources=(good, FilesSource(path="/nowhere")))
    with pytest.raises(UserError, match=r"val\.source\.sources\[1\]\.path='/nowhere'"):
        open_sources(mix, "val.source")


def test_a_parquet_file_without_rows_is_refused(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"prompt": []}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet' has no rows"):
        open_rows(FilesSource(path=str(tmp_path / "a.parquet")), "data.source")


@pytest.mark.parametrize("damage", ["cut", "pages"])
def test_a_broken_parquet_file_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    content = path.read_bytes()
    path.write_bytes(content[:50] if damage == "cut" else b"PAR1" + b"\xff" * 90 + content[94:])
    with pytest.raises(UserError, match=r"a\.parquet is not a readable Parquet file"):
        open_rows(FilesSource(path=str(tmp_path / "a.parquet")), "data.source")


class Numbers:
    def __init__(self, numbers: range) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict:
        return {"n": self.numbers[index]}

    def where(self, index: int) -> str:
        return f"n{self.numbers[index]}"


def test_chained_rows_skip_empty_parts() -> None:
    rows = ChainedRows([Numbers(range(2)), Numbers(range(0)), Numbers(range(2, 5))])
    assert [rows[i]["n"] for i in range(len(rows))] == list(range(5))
    assert rows.where(2) == "n2"


def test_the_parts_of_a_split_are_disjoint_and_whole() -> None:
    rows = Numbers(range(50))
    held_out, rest = SplitRows(rows, 0, 10), SplitRows(rows, 10, 50)
    numbers = [part[i]["n"] for part in (held_out, rest) for i in range(len(part))]
    assert len(held_out) == 10
    assert sorted(numbers) == list(range(50))
