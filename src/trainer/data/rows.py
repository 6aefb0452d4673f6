"""What a row of training data may look like, and its reading from plain dicts.

Owns the two row kinds and the checks on their fields. Does not know files (`sources.py`) nor tokens
(`encode.py`, read next).
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
WEIGHTS = 1e-30, 1e30
"""Between these a weight, and the sum of many, keeps its precision in float32."""


WHAT_A_TURN_SAYS = {"content", "tool_calls", "reasoning_content"}


class BadRow(Exception):  # noqa: N818 - becomes a UserError, or a count, where the policy is known
    """A row that cannot be trained on.

    Args:
        reason: short name under which skipped rows are counted.
        message: what is wrong and how to mend it; the caller adds file and line.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class ChatRow:
    """A conversation; assistant turns from `first_trained` on may be trained, but `untrained`."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None
    first_trained: int
    weight: float
    untrained: frozenset[int] = frozenset()

    @property
    def assistant_turns(self) -> list[int]:
        """Indices of the messages that may be trained."""
        return [
            index
            for index, message in enumerate(self.messages)
            if message["role"] == "assistant"
            and index >= self.first_trained
            and index not in self.untrained
        ]

    @property
    def question(self) -> tuple[Message, ...]:
        """What the model has seen when it writes the last assistant turn."""
        return self.messages[: self.assistant_turns[-1]]

    @property
    def answer(self) -> str:
        """Text of the last assistant turn."""
        return self.messages[self.assistant_turns[-1]]["content"]


@dataclass(frozen=True)
class TextRow:
    """Plain text; the completion (and the end-of-text token) is trained."""

    prompt: str
    completion: str
    weight: float

    @property
    def question(self) -> str:
        """What the model has seen when it writes the completion."""
        return self.prompt

    @property
    def answer(self) -> str:
        """The completion."""
        return self.completion


Row = ChatRow | TextRow


def question_text(row: Row) -> str:
    """Return the question for people: the prompt, or the last user turn."""
    if isinstance(row, TextRow):
        return row.prompt
    users = [m["content"] for m in row.question if m["role"] == "user"]
    return users[-1] if users else ""


def question_key(row: Row) -> bytes:
    """Return 16 bytes that are equal for equal questions (all turns before the last answer)."""
    return question_keys(row)[-1]


def question_keys(row: Row) -> list[bytes]:
    """Return the key of what comes before each answer of the row, in order."""
    if isinstance(row, TextRow):
        return [_extend_hash(hashlib.blake2b(digest_size=16), row.prompt).digest()]
    keys = []
    answers = set(row.assistant_turns)
    hashed = hashlib.blake2b(digest_size=16)
    for index, message in enumerate(row.messages):
        if index in answers:
            keys.append(hashed.digest())
        _extend_hash(hashed, message)
    return keys


def _extend_hash(hashed: hashlib.blake2b, value: Any) -> hashlib.blake2b:
    # Rows of Parquet may hold what JSON does not, such as dates.
    hashed.update(json.dumps(value, sort_keys=True, default=str).encode())
    return hashed


def parse_row(raw: Mapping[str, Any]) -> Row:
    """Read one row.

    Args:
        raw: has `messages`, or `prompt` and `completion` (both text, or both lists of messages);
            may have `tools` (a list, or JSON text of one) and `weight`. None is like absent. A turn
            of `weight` 0 is not trained.

    Raises:
        BadRow: a field is missing or misshaped, or there is no assistant turn.
    """
    fields = {key: value for key, value in raw.items() if value is not None}
    weight = _parse_weight(fields.get("weight", 1.0))
    if "messages" in fields:
        return _parse_chat(fields["messages"], (), fields.get("tools"), weight)
    if "prompt" not in fields or "completion" not in fields:
        raise BadRow(
            "missing_fields",
            f"the row has the fields {sorted(fields)}: it needs messages, or prompt and completion",
        )
    prompt, completion = fields["prompt"], fields["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise BadRow("empty_completion", "completion='' leaves nothing to train: give it text")
        return TextRow(prompt, completion, weight)
    for name, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, str | list | tuple):
            raise BadRow(
                name, f"{name}={value!r} is a {type(value).__name__}: give text or a list of turns"
            )
    if isinstance(prompt, str) or isinstance(completion, str):
        raise BadRow(
            "mixed_prompt",
            f"prompt is a {type(prompt).__name__} and completion a {type(completion).__name__}: "
            "give both as text, or both as lists of messages",
        )
    return _parse_chat(completion, prompt, fields.get("tools"), weight)


def _parse_weight(weight: Any) -> float:
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise BadRow("weight", f"weight={weight!r} is not a number: give one, at least 0")
    low, high = WEIGHTS
    if weight != 0 and not low <= weight <= high:
        shown = f"{weight!r:.24}" + ("…" if len(repr(weight)) > 24 else "")
        raise BadRow("weight", f"weight={shown}: give 0, or a number from {low:g} to {high:g}")
    return float(weight)


def _parse_chat(turns: Any, context: Any, tools: Any, weight: float) -> ChatRow:
    messages = tuple(_parse_message(m) for m in [*context, *_as_list(turns, "messages")])
    untrained = frozenset(i for i, message in enumerate(messages) if not _is_trained(message))
    messages = tuple({k: v for k, v in m.items() if k != "weight"} for m in messages)
    row = ChatRow(messages, _parse_tools(tools), len(context), weight, untrained)
    if not row.assistant_turns:
        roles = [message["role"] for message in messages]
        raise BadRow(
            "no_assistant_turn",
            f"the row's turns are {roles}: without an assistant turn (whose weight is not 0) there "
            "is nothing to train; add one or remove the row",
        )
    return row


def _as_list(value: Any, field: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise BadRow(field, f"{field} is a {type(value).__name__}: give a list")
    return list(value)


def _parse_message(message: Any) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadRow("messages", f"{message!r} is not a turn: give an object with role and content")
    kept = {key: value for key, value in message.items() if value is not None}
    if not kept.keys() & WHAT_A_TURN_SAYS:
        raise BadRow(
            "no_content",
            f"the {kept['role']} turn has the fields {sorted(kept)}: it needs content (text, which "
            "may be empty), or tool_calls or reasoning_content in its place",
        )
    kept["content"] = _parse_content(kept.get("content", ""))
    if "tool_calls" in kept:
        calls = _as_list(kept["tool_calls"], "tool_calls")
        kept["tool_calls"] = [_parse_tool_call(call) for call in calls]
    return kept


def _is_trained(message: Message) -> bool:
    """Read a turn's own weight, which says whether it is trained."""
    if isinstance(message.get("train"), bool):
        raise BadRow(
            "weight", f"a turn has train={message['train']}: give it weight 0 or 1 in its place"
        )
    weight = message.get("weight", 1)
    if isinstance(weight, bool) or weight not in (0, 1):
        raise BadRow(
            "weight",
            f"weight={weight!r} of a turn: give 0, not trained, or 1; other numbers are for rows",
        )
    return weight == 1


def _parse_content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    raise BadRow("messages", f"content={content!r} is not text: give text or a list of text parts")


def _parse_tool_call(call: Any) -> dict[str, Any]:
    """Give the call's arguments as an object: templates would quote JSON text a second time."""
    if not isinstance(call, Mapping):
        raise BadRow("tool_calls", f"{call!r} is not a tool call: give an object")
    call = {key: value for key, value in call.items() if value is not None}
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _parse_tool_call(call["function"])}
    if not isinstance(call.get("name"), str):
        raise BadRow("tool_calls", f"tool call {call!r} has no name: add one")
    if isinstance(call.get("arguments"), str):
        return {**call, "arguments": _parse_json("tool_calls", call["arguments"])}
    return call


def _parse_tools(tools: Any) -> tuple[dict[str, Any], ...] | None:
    if isinstance(tools, str):
        tools = _parse_json("tools", tools)
    if not tools:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(t, Mapping) for t in tools):
        raise BadRow("tools", f"tools={tools!r} is not a list of JSON schemas: give one")
    return tuple(dict(tool) for tool in tools)


def _parse_json(field: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRow(field, f"{field} holds {text!r}, which is not JSON: {error}") from None
