import datetime

import pytest

from trainer.data.rows import BadRow, ChatRow, TextRow, parse_row, question_key, question_text

USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "hello"}


def test_messages_become_a_conversation_with_all_assistant_turns() -> None:
    row = parse_row({"messages": [USER, ASSISTANT, USER, ASSISTANT], "weight": 0.5})
    assert isinstance(row, ChatRow)
    assert (row.assistant_turns, row.weight, row.answer) == ([1, 3], 0.5, "hello")
    assert row.question == (USER, ASSISTANT, USER)
    assert question_text(row) == "hi"


def test_prompt_and_completion_as_messages_train_the_completion_alone() -> None:
    row = parse_row({"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]})
    assert isinstance(row, ChatRow)
    assert row.assistant_turns == [3]


def test_prompt_and_completion_as_text_stay_text() -> None:
    assert parse_row({"prompt": "2+2=", "completion": "4"}) == TextRow("2+2=", "4", 1.0)


def test_null_fields_and_null_content_are_like_absent_ones() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": None}
    row = parse_row({"messages": [USER, turn], "prompt": None, "tools": None})
    assert isinstance(row, ChatRow)
    assert row.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
        ],
    }


def test_tools_may_be_json_text() -> None:
    row = parse_row({"messages": [USER, ASSISTANT], "tools": '[{"name": "add"}]'})
    assert isinstance(row, ChatRow)
    assert row.tools == ({"name": "add"},)


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    row = parse_row({"messages": [{"role": "user", "content": parts}, ASSISTANT]})
    assert isinstance(row, ChatRow)
    assert row.messages[0]["content"] == "ab"


@pytest.mark.parametrize(
    ("raw", "reason", "message"),
    [
        ({"messages": [USER]}, "no_assistant_turn", r"\['user'\].*without an assistant turn"),
        ({"messages": []}, "no_assistant_turn", r"\[\]"),
        ({"prompt": [ASSISTANT], "completion": [USER]}, "no_assistant_turn", "assistant"),
        ({"text": "x"}, "missing_fields", r"\['text'\]: it needs messages, or prompt"),
        ({"messages": "hi"}, "messages", "messages is a str"),
        ({"messages": ["hi"]}, "messages", "'hi' is not a turn"),
        ({"messages": [{"role": "user", "content": 3}, ASSISTANT]}, "messages", "content=3"),
        ({"prompt": "a", "completion": [ASSISTANT]}, "mixed_prompt", "prompt is a str"),
        ({"prompt": "a", "completion": ""}, "empty_completion", "completion=''"),
        ({"messages": [USER, ASSISTANT], "weight": "1"}, "weight", "weight='1'"),
        ({"messages": [USER, ASSISTANT], "weight": -1}, "weight", "weight=-1"),
        ({"messages": [USER, ASSISTANT], "weight": float("nan")}, "weight", "weight=nan"),
        ({"messages": [USER, ASSISTANT], "weight": 1e-40}, "weight", "weight=1e-40: give 0, or"),
        ({"messages": [USER, ASSISTANT], "weight": 1e39}, "weight", r"to 1e\+30"),
        ({"messages": [USER, ASSISTANT], "weight": 10**400}, "weight", "weight=10+…: give"),
        ({"prompt": 1, "completion": "a"}, "prompt", "prompt=1 is a int"),
        ({"messages": [USER, {"role": "assistant"}]}, "no_content", "assistant turn .*content"),
        ({"messages": [{"role": "user", "text": "hi"}, ASSISTANT]}, "no_content", "'text'"),
        ({"messages": [USER, {**ASSISTANT, "tool_calls": "f"}]}, "tool_calls", "tool_calls is a"),
        ({"messages": [USER, ASSISTANT], "tools": "[1"}, "tools", r"tools holds '\[1'"),
        ({"messages": [USER, ASSISTANT], "tools": [1]}, "tools", r"tools=\[1\]"),
        (
            {"messages": [USER, {**ASSISTANT, "tool_calls": [{"name": "f", "arguments": "{"}]}]},
            "tool_calls",
            "holds '{'",
        ),
        ({"messages": [USER, {**ASSISTANT, "tool_calls": [{}]}]}, "tool_calls", "no name"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_a_bad_row_says_what_is_wrong(raw: dict, reason: str, message: str) -> None:
    with pytest.raises(BadRow, match=message) as caught:
        parse_row(raw)
    assert caught.value.reason == reason


def test_questions_are_equal_when_all_turns_before_the_answer_are() -> None:
    first = parse_row({"messages": [USER, ASSISTANT]})
    same = parse_row({"messages": [USER, {"role": "assistant", "content": "other"}]})
    longer = parse_row({"messages": [USER, ASSISTANT, USER, ASSISTANT]})
    assert question_key(first) == question_key(same) != question_key(longer)


def test_what_json_lacks_is_part_of_a_question_too() -> None:
    first, same, other = (
        parse_row({"messages": [{**USER, "sent": datetime.date(2026, 1, day)}, ASSISTANT]})
        for day in (1, 1, 2)
    )
    assert question_key(first) == question_key(same) != question_key(other)


def test_a_turn_of_weight_0_is_not_trained() -> None:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "bad", "weight": 0},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "good", "weight": 1},
    ]
    row = parse_row({"messages": turns})
    assert row.assistant_turns == [3]
    assert row.answer == "good"
    # Templates see what they would without it.
    assert all("weight" not in message for message in row.messages)
    assert parse_row({"messages": [turns[0], turns[1] | {"weight": None}]}).assistant_turns == [1]
    with pytest.raises(BadRow, match=r"without an assistant turn \(whose weight is not 0\)"):
        parse_row({"messages": turns[:2]})


@pytest.mark.parametrize("given", [{"weight": 0.5}, {"weight": True}, {"weight": "0"}], ids=str)
def test_a_turns_weight_is_0_or_1(given) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **given}]
    with pytest.raises(BadRow, match=r"weight=.* of a turn: give 0, not trained, or 1"):
        parse_row({"messages": turns})
    turns[1] = {"role": "assistant", "content": "b", "train": False}
    with pytest.raises(BadRow, match="train=False: give it weight 0 or 1"):
        parse_row({"messages": turns})
