"""Conversations as text, with the exact spans that the assistant wrote.

Owns chat templates: which text a model is prompted with, what it would write after that, and what
to do with templates that rewrite earlier turns. Knows no token ids; `encode.py`, read next, maps
spans of characters to tokens.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from trainer.data.rows import BadRow, ChatRow, Message
from trainer.errors import UserError

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_GIVEN_TO_TEMPLATES = {
    *("messages", "tools", "documents", "conversations", "chat_template"),
    *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
}
"""What rendering itself passes to a template."""
_TEMPLATE_FAILURES = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError),
    *(ArithmeticError, RecursionError),
)
"""What a template can raise over a row: Jinja's own errors, and Python's from its expressions."""
Span = tuple[int, int]


@dataclass(frozen=True)
class Rendering:
    """Text of (part of) a conversation and the character spans to train on, in order."""

    text: str
    spans: tuple[Span, ...]


class ChatRenderer:
    """Renders conversations with a tokenizer's chat template.

    For each trained turn i, the text before it is what the model is prompted with when it is to
    write that turn, `render(messages[:i], add_generation_prompt)`, and the text up to it is
    `render(messages[:i + 1])`. Where the template marks the assistant's text with
    `{% generation %}`, the marked text is trained (but never a part of the prompt); otherwise all
    that follows the prompt. The end-of-turn token is trained in either case.

    A template may rewrite earlier turns (Qwen3's drops earlier reasoning): then the text up to
    turn i does not begin with the text up to the turn before. Such a conversation becomes several
    renderings, each turn trained after exactly the text that it would have been prompted with.

    Args:
        tokenizer: gives the template and the special tokens.
        variables: further variables for the template (`data.template_kwargs`).

    Raises:
        UserError: a variable is one that every template gets, or that this one does not mention.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, variables: dict[str, Any]) -> None:
        _check_variables(variables, str(tokenizer.chat_template or ""))
        self._tokenizer = tokenizer
        self._variables = {**tokenizer.special_tokens_map, **variables}
        self._turn_ends = tuple(token.content for token in tokenizer.added_tokens_decoder.values())

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict] | None) -> str:
        """Return the text that a model is given to write the next assistant turn.

        Raises:
            BadRow: the template refuses the conversation.
        """
        return self._render(messages, tools, add_generation_prompt=True).text

    def render(self, row: ChatRow, turns: Sequence[int]) -> list[Rendering]:
        """Render a conversation so that each of the given assistant turns is trained once.

        Turns after the last trained one have no effect on it and are left out.

        Args:
            row: the conversation.
            turns: indices of assistant turns, ascending.

        Raises:
            BadRow: the template refuses the conversation, or what it writes for a turn does not
                continue the prompt for that turn.
        """
        renderings: list[Rendering] = []
        for turn in turns:
            rendering = self._render_turn(row, turn)
            if renderings and rendering.text.startswith(renderings[-1].text):
                spans = renderings.pop().spans + rendering.spans
                rendering = Rendering(rendering.text, spans)
            renderings.append(rendering)
        return renderings

    def _render_turn(self, row: ChatRow, turn: int) -> Rendering:
        prompt = self.prompt(row.messages[:turn], row.tools)
        whole = self._render(row.messages[: turn + 1], row.tools)
        start = _common_length(prompt, whole.text)
        if self._has_marks(row.tools):
            spans = [(max(first, start), last) for first, last in whole.spans if last > start]
            if not spans and start == len(prompt):
                spans = [(start, start)]  # an empty turn, of which only the end may be trained
        elif start == len(prompt):
            spans = [(start, len(whole.text))]
        else:
            raise BadRow(
                "template",
                f"the chat template writes turn {turn} as {whole.text[start : start + 40]!r} where "
                f"the prompt for it reads {prompt[start : start + 40]!r}, so the model would be "
                "trained on what it is never asked: mark the assistant's text with "
                "{% generation %} in a template of your own (data.chat_template)",
            )
        spans = [(first, self._end_of_turn(whole.text, first, last)) for first, last in spans]
        spans = [(first, last) for first, last in spans if last > first]
        if not spans:
            raise BadRow("template", f"the chat template writes nothing for turn {turn}")
        return Rendering(whole.text, tuple(spans))

    def _end_of_turn(self, text: str, start: int, end: int) -> int:
        """Move a span's end to just behind the end-of-turn token, if one is there."""
        for token in self._turn_ends:
            if text.startswith(token, end) and not text.endswith(token, start, end):
                return end + len(token)
        stripped = text[start:end].rstrip()
        return start + len(stripped) if stripped.endswith(self._turn_ends) else end

    def _has_marks(self, tools: Sequence[dict] | None) -> bool:
        return _GENERATION_BLOCK.search(self._template(tools)) is not None

    def _template(self, tools: Sequence[dict] | None) -> str:
        try:
            return self._tokenizer.get_chat_template(None, list(tools) if tools else None)
        except ValueError as error:
            raise BadRow(
                "template",
                "the tokenizer has no chat template for rows of messages: set data.chat_template, "
                "or give rows with prompt and completion as text",
            ) from error

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict] | None,
        add_generation_prompt: bool = False,
    ) -> Rendering:
        template = self._template(tools)
        has_marks = _GENERATION_BLOCK.search(template) is not None
        try:
            rendered: Any = render_jinja_template(
                [list(messages)],
                tools=list(tools) if tools else None,
                chat_template=template,
                return_assistant_tokens_mask=has_marks,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"data.tokenizer: its chat template {_fault(error)}") from error
        except _TEMPLATE_FAILURES as error:
            raise BadRow("template", f"the chat template refuses the row: {error}") from error
        texts, spans = rendered
        return Rendering(texts[0], tuple(spans[0]) if has_marks else ())


def check_template(template: str, field: str) -> None:
    """Refuse a template that is no Jinja, before any row is blamed for it.

    Args:
        template: text of the template.
        field: what the user gave, with its value, for the message.

    Raises:
        UserError: it does not compile.
    """
    try:
        render_jinja_template([[{"role": "user", "content": ""}]], chat_template=template)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"{field} {_fault(error)}") from error
    except _TEMPLATE_FAILURES:
        pass  # It compiles, and may refuse this conversation and take the rows.


def _fault(error: jinja2.TemplateSyntaxError) -> str:
    return f"is no valid Jinja (line {error.lineno}: {error.message}): mend the template"


def _check_variables(variables: dict[str, Any], templates: str) -> None:
    for name in variables:
        if name in _GIVEN_TO_TEMPLATES:
            raise UserError(
                f"data.template_kwargs.{name}: every chat template gets {name} from the row and "
                "the trainer; remove it"
            )
        if not re.search(rf"\b{re.escape(name)}\b", templates):
            raise UserError(
                f"data.template_kwargs.{name}={variables[name]!r}: the chat template does not "
                "mention it, so it would have no effect; correct the name, or remove it"
            )


def _common_length(first: str, second: str) -> int:
    """Return how many characters two texts share at the start."""
    if second.startswith(first):
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
