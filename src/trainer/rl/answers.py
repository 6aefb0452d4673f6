"""Where in a completion the answer stands.

Owns extraction only; `rewards.py`, read next, compares the answer.
"""

import re
from collections.abc import Callable

from trainer.config.rl import AnswerConfig, BoxedAnswer, RegexAnswer, TaggedAnswer, WholeAnswer

ExtractAnswer = Callable[[str], str | None]


def build_extractor(config: AnswerConfig) -> ExtractAnswer:
    """Return the function from a completion to its answer, None where it holds none."""
    match config:
        case WholeAnswer():
            return str.strip
        case TaggedAnswer(tag=tag):
            tagged = re.compile(rf"<{tag}>(.*?)</{tag}>", re.DOTALL)
            return lambda completion: last_group(tagged, completion)
        case BoxedAnswer():
            return last_boxed
        case RegexAnswer(pattern=pattern):
            compiled = re.compile(pattern, re.DOTALL)
            return lambda completion: last_group(compiled, completion)


def last_group(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the first group of the last match, without the space around it."""
    groups = [match.group(1) for match in pattern.finditer(text)]
    return groups[-1].strip() if groups and groups[-1] is not None else None


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}` whose braces close; they may nest."""
    for begin in reversed([match.end() for match in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for position in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[begin:position].strip()
    return None
