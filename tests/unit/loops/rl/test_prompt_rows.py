"""The reference answer of a row; whole rows are read in `test_prompts.py`."""

import datetime

import pytest

from trainer.config.data import FilesSource, FunctionSource, MixSource, ReasoningGymSource
from trainer.data.rows import BadRow, ChatRow, TextRow
from trainer.loops.rl.prompt_rows import read_row, reference_text, source_names


@pytest.mark.parametrize(
    ("answer", "text"),
    [(4, "4"), (True, "True"), (1.5, "1.5"), (datetime.date(2026, 1, 2), "2026-01-02"), ("", "")],
)
def test_a_reference_is_text_or_one_value(answer, text):
    assert reference_text(answer) == text


@pytest.mark.parametrize("answer", [["1", "one"], {"text": "1"}, b"1", None])
def test_what_is_no_one_value_is_refused(answer):
    with pytest.raises(BadRow, match=f"answer is a {type(answer).__name__}: give text or a number"):
        reference_text(answer)


def test_sources_of_a_mix_are_named_apart():
    task = ReasoningGymSource(task="chain_sum", size=5)
    files, function = FilesSource(path="data/math.jsonl"), FunctionSource(path="my_env:rows")
    mix = MixSource(sources=(task, files, function, task))
    assert source_names(mix) == ["chain_sum-0", "math.jsonl", "my_env:rows", "chain_sum-3"]
    assert source_names(task) == [""]


USER = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}


def test_an_answer_takes_the_form_of_its_prompt():
    chat = ChatRow((USER, ANSWER), None, first_trained=1, weight=1.0)
    assert read_row({"question": "2+2?", "answer": 4}, needs_answer=True) == chat
    text = TextRow("2+2=", "4", weight=1.0)
    assert read_row({"prompt": "2+2=", "answer": 4}, needs_answer=True) == text


EARLIER = [USER, ANSWER, {"role": "user", "content": "why?"}]


@pytest.mark.parametrize(
    ("row", "question"),
    [
        ({"question": "2+2?"}, (USER,)),
        ({"prompt": "2+2="}, "2+2="),
        ({"prompt": [USER], "ground_truth": "4"}, (USER,)),
        ({"prompt": EARLIER}, tuple(EARLIER)),
        ({"messages": [USER]}, (USER,)),
    ],
)
def test_a_row_that_nothing_compares_needs_no_answer(row, question):
    read = read_row(row, needs_answer=False)
    assert (read.question, read.answer) == (question, "")
    with pytest.raises(BadRow, match="no reference answer"):
        read_row(row, needs_answer=True)


@pytest.mark.parametrize("needs_answer", [True, False])
def test_the_last_answer_of_supervised_data_is_the_reference(needs_answer):
    for row in ({"messages": EARLIER}, {"prompt": [USER], "completion": [ANSWER]}):
        read = read_row(row, needs_answer=needs_answer)
        assert (read.question, read.answer) == ((USER,), "4")
