import pytest

from trainer.config.data import ReasoningGymSource
from trainer.data.reasoning_gym import ReasoningGymRows
from trainer.data.rows import BadRow
from trainer.data.sources import open_rows
from trainer.errors import UserError


def test_task_items_are_an_index_range_of_one_seed() -> None:
    whole = open_rows(ReasoningGymSource(task="spell_backward", size=10), "data.source")
    part = open_rows(ReasoningGymSource(task="spell_backward", size=4, start=6), "data.source")
    assert [part[i] for i in range(4)] == [whole[i] for i in range(6, 10)]
    assert part.where(0) == "spell_backward(seed=0): item 6"


def test_template_and_system_turn_shape_the_question() -> None:
    source = ReasoningGymSource(
        task="spell_backward", size=1, template="reverse {word}", system="be brief"
    )
    rows = ReasoningGymRows(source, "data.source")
    item = rows.item(0)
    assert rows[0]["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": f"reverse {item['metadata']['word']}"},
        {"role": "assistant", "content": item["answer"]},
    ]


def test_a_template_with_an_unknown_field_names_the_fields() -> None:
    rows = open_rows(
        ReasoningGymSource(task="spell_backward", size=1, template="{wrod}"), "data.source"
    )
    with pytest.raises(UserError, match=r"template='\{wrod\}'.*'word'"):
        rows[0]


def test_a_task_item_without_an_answer_is_a_bad_row(monkeypatch: pytest.MonkeyPatch) -> None:
    source = ReasoningGymSource(task="spell_backward", size=1)
    rows = ReasoningGymRows(source, "data.source")
    monkeypatch.setattr(rows, "task", [{"question": "q", "answer": None, "metadata": {}}])
    with pytest.raises(BadRow, match="no answer"):
        rows[0]
