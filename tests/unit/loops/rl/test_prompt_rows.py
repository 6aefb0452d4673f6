"""The reference answer of a row; whole rows are read in `test_prompts.py`."""

import datetime

import pytest

from trainer.data.rows import BadRow
from trainer.loops.rl.prompt_rows import reference_text, with_answer


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


def test_an_answer_takes_the_form_of_its_prompt():
    turns = [{"role": "user", "content": "2+2?"}]
    answer = {"role": "assistant", "content": "4"}
    assert with_answer({"question": "2+2?", "answer": 4}) == {
        "prompt": turns,
        "completion": [answer],
    }
    assert with_answer({"prompt": "2+2=", "answer": 4}) == {"prompt": "2+2=", "completion": "4"}
