"""Where in a completion the answer stands.

Owns extraction only; `rewards.py`, read next, compares the answer.
"""

import re
from collections.abc import Callable
from functools import partial

from trainer.config.rl import AnswerConfig, BoxedAnswer, RegexAnswer, TaggedAnswer, WholeAnswer

ExtractAnswer = Callable[[str], str | None]


def build_extractor(config: AnswerConfig) -> ExtractAnswer:
    """Return the function from a completion to its answer, None where it holds none."""
    match config:
        case WholeAnswer():
            return str.strip
        case TaggedAnswer(tag=tag):
            return partial(last_tagged, tag=tag)
        case BoxedAnswer():
            return last_boxed
        case RegexAnswer(pattern=pattern):
            return partial(last_group, re.compile(pattern))


def last_group(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the first group of the last match, without the space around it."""
    groups = [match.group(1) for match in pattern.finditer(text)]
    return groups[-1].strip() if groups and groups[-1] is not None else None


def last_tagged(text: str, tag: str) -> str | None:
    """Return what stands between the last `</tag>` that has a `<tag>` before it, and that tag."""
    answer, begin = None, None
    for match in re.finditer(f"<(/?){tag}>", text):
        if not match[1]:
            begin = match.end()
        elif begin is not None:
            answer, begin = text[begin : match.start()].strip(), None
    return answer


_BRACES = re.compile(r"(?P<box>\\boxed\s*\{)|\\.|[{}]", re.DOTALL)
r"""What opens or closes; a backslash takes the brace after it out of the count."""


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}` whose braces close; they may nest.

    One pass: a policy that has collapsed writes thousands of `\boxed{`.
    """
    boxes: list[int | None] = []
    """Of each open brace: where its content begins, None for one that opens no box."""
    last = (-1, -1)
    for match in _BRACES.finditer(text):
        if match["box"]:
            boxes.append(match.end())
        elif match[0] == "{":
            boxes.append(None)
        elif match[0] == "}" and boxes:
            begin = boxes.pop()
            if begin is not None:
                last = max(last, (begin, match.start()))
    return None if last[0] < 0 else text[slice(*last)].strip()
