import pytest

from tests.support.tokenizers import (
    DROPS_EARLIER_REASONING,
    MARKS_ALL_BUT_THE_END,
    PLAIN_CHATML,
    PROMPTS_FOR_REASONING_IT_DROPS,
    REFUSES_SYSTEM_TURNS,
    byte_tokenizer,
)
from trainer.data.chat import ChatRenderer, Rendering
from trainer.data.rows import BadRow, ChatRow, parse_row
from trainer.errors import UserError


def conversation(*turns: tuple[str, str], **fields: object) -> ChatRow:
    messages = [{"role": role, "content": content} for role, content in turns]
    row = parse_row({"messages": messages, **fields})
    assert isinstance(row, ChatRow)
    return row


TWO_TURNS = conversation(("user", "q1"), ("assistant", "a1"), ("user", "q2"), ("assistant", "a2"))


def render(template: str | None, row: ChatRow, turns: list[int] | None = None) -> list[Rendering]:
    renderer = ChatRenderer(byte_tokenizer(template), {})
    return renderer.render(row, row.assistant_turns if turns is None else turns)


def trained(rendering: Rendering) -> list[str]:
    return [rendering.text[start:end] for start, end in rendering.spans]


@pytest.mark.parametrize(
    "template",
    [None, PLAIN_CHATML, MARKS_ALL_BUT_THE_END],
    ids=["built-in", "no marks", "marks leave the end out"],
)
def test_exactly_the_assistants_words_and_its_end_token_are_trained(template: str | None) -> None:
    (rendering,) = render(template, TWO_TURNS)
    assert rendering.text == (
        "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n"
        "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\na2<|im_end|>\n"
    )
    assert trained(rendering) == ["a1<|im_end|>", "a2<|im_end|>"]


@pytest.mark.parametrize(
    "template",
    [None, PLAIN_CHATML, MARKS_ALL_BUT_THE_END],
    ids=["built-in", "no marks", "marks leave the end out"],
)
def test_of_an_empty_turn_the_end_token_is_trained(template: str | None) -> None:
    row = conversation(("user", "q"), ("assistant", ""), ("user", "r"), ("assistant", "a"))
    (rendering,) = render(template, row)
    assert trained(rendering) == ["<|im_end|>", "a<|im_end|>"]


def test_the_rendering_is_the_templates_own() -> None:
    (rendering,) = render(None, TWO_TURNS)
    assert rendering.text == byte_tokenizer().apply_chat_template(
        list(TWO_TURNS.messages), tokenize=False
    )


def test_words_of_the_assistant_that_a_user_repeats_are_not_trained() -> None:
    row = conversation(("user", "a1"), ("assistant", "a1"), ("user", "a1"), ("assistant", "b"))
    (rendering,) = render(PLAIN_CHATML, row)
    assert trained(rendering) == ["a1<|im_end|>", "b<|im_end|>"]
    assert rendering.spans[0][0] == rendering.text.index("assistant\na1") + len("assistant\n")


def test_turns_that_are_not_asked_for_stay_context() -> None:
    (rendering,) = render(PLAIN_CHATML, TWO_TURNS, turns=[3])
    assert trained(rendering) == ["a2<|im_end|>"]
    assert "a1" in rendering.text


def test_a_template_that_rewrites_earlier_turns_gives_one_rendering_a_turn() -> None:
    first, second = render(DROPS_EARLIER_REASONING, TWO_TURNS)
    assert trained(first) == ["<think>\n\n</think>\n\na1<|im_end|>"]
    assert trained(second) == ["<think>\n\n</think>\n\na2<|im_end|>"]
    assert second.text.startswith(
        "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n"
    )


@pytest.mark.parametrize(
    "template",
    [None, PLAIN_CHATML, DROPS_EARLIER_REASONING, MARKS_ALL_BUT_THE_END],
    ids=["built-in", "no marks", "rewrites", "marks"],
)
def test_every_trained_turn_follows_what_the_model_would_be_prompted_with(
    template: str | None,
) -> None:
    renderer = ChatRenderer(byte_tokenizer(template), {})
    renderings = renderer.render(TWO_TURNS, TWO_TURNS.assistant_turns)
    contexts = [r.text[:start] for r in renderings for start, _ in r.spans]
    assert contexts == [renderer.prompt(TWO_TURNS.messages[:turn], None) for turn in (1, 3)]


def test_a_turn_that_does_not_continue_its_prompt_is_refused() -> None:
    with pytest.raises(BadRow, match=r"reads '<think>.n'.*data.chat_template") as caught:
        render(PROMPTS_FOR_REASONING_IT_DROPS, TWO_TURNS)
    assert caught.value.reason == "template"


def test_what_the_prompt_already_holds_is_not_trained_though_marked() -> None:
    template = (
        "{%- for m in messages %}{%- if m.role == 'assistant' %}"
        "{% generation %}{{ 'A:' + m.content + '<|im_end|>' }}{% endgeneration %}"
        "{%- else %}{{ 'U:' + m.content + '\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ 'A:' }}{%- endif %}"
    )
    (rendering,) = render(template, TWO_TURNS, turns=[1])
    assert trained(rendering) == ["a1<|im_end|>"]


def test_a_template_that_refuses_the_row_makes_it_a_bad_row() -> None:
    row = conversation(("system", "s"), ("user", "q"), ("assistant", "a"))
    with pytest.raises(BadRow, match="no system turns"):
        render(REFUSES_SYSTEM_TURNS, row)


def test_a_tokenizer_without_a_template_names_the_remedy() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(BadRow, match=r"set data\.chat_template"):
        ChatRenderer(tokenizer, {}).render(TWO_TURNS, [1])


def test_the_built_in_template_writes_tools_calls_and_reasoning() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
    row = parse_row({"messages": messages, "tools": [{"name": "add"}]})
    assert isinstance(row, ChatRow)
    (rendering,) = render(None, row)
    assert trained(rendering) == [
        '<think>\nhm\n</think>\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
        "<|im_end|>",
        "two<|im_end|>",
    ]
    assert rendering.text.startswith(
        '<|im_start|>system\nbe brief\n\nTools, one JSON schema a line:\n{"name": "add"}\n'
    )
    assert "<|im_start|>tool\n2<|im_end|>\n" in rendering.text
    assert rendering.text.count("be brief") == 1


def test_template_variables_reach_the_template() -> None:
    template = "{{ greeting }}{%- for m in messages %}{{ m.content }}{%- endfor %}"
    renderer = ChatRenderer(byte_tokenizer(template), {"greeting": "hello "})
    assert renderer.prompt(TWO_TURNS.messages[:1], None) == "hello q1"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("greting", r"data\.template_kwargs\.greting='x': the chat template does not mention it"),
        ("messages", r"data\.template_kwargs\.messages: every chat template gets messages"),
    ],
)
def test_a_variable_without_effect_is_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ChatRenderer(byte_tokenizer("{{ greeting }}"), {name: "x"})


def test_a_broken_template_of_the_tokenizer_is_not_blamed_on_a_row() -> None:
    with pytest.raises(UserError, match=r"data\.tokenizer: its chat template is no valid Jinja"):
        ChatRenderer(byte_tokenizer("{% if"), {}).prompt(TWO_TURNS.messages[:1], None)


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages[9].role }}", "{{ x.y }}"])
def test_what_a_template_cannot_do_with_a_row_makes_it_a_bad_row(template: str) -> None:
    with pytest.raises(BadRow, match="the chat template refuses the row"):
        ChatRenderer(byte_tokenizer(template), {}).prompt(TWO_TURNS.messages[:1], None)
