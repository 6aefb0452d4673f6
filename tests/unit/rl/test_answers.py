import pytest

from trainer.config.rl import BoxedAnswer, RegexAnswer, TaggedAnswer, WholeAnswer
from trainer.rl.answers import build_extractor

CASES = {
    "whole": (WholeAnswer(), "  42 \n", "42"),
    "tag, last one": (TaggedAnswer(), "<answer>1</answer> no, <answer> 2\n</answer>!", "2"),
    "tag of another name": (TaggedAnswer(tag="final"), "<final>x</final>", "x"),
    "tag that does not close": (TaggedAnswer(), "<answer>1", None),
    "boxed, nested": (BoxedAnswer(), r"so \boxed{1} or \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
    "boxed, last one unclosed": (BoxedAnswer(), r"\boxed{3} and \boxed{4", "3"),
    "boxed, one around the other": (BoxedAnswer(), r"\boxed{a \boxed{b} c}", "b"),
    "boxed, escaped braces": (
        BoxedAnswer(),
        r"\boxed{\left\{ 1 \right.} or so",
        r"\left\{ 1 \right.",
    ),
    "boxed, empty": (BoxedAnswer(), r"\boxed{}", ""),
    "tag opened twice": (TaggedAnswer(), "<answer>no, <answer>1</answer></answer>", "1"),
    "regex, to the end of the line": (RegexAnswer(pattern=r"####(.*)"), "#### 5\n#nothing", "5"),
    "regex, over lines": (RegexAnswer(pattern=r"(?s)####(.*)"), "#### 5\n6", "5\n6"),
    "no box": (BoxedAnswer(), "4", None),
    "regex, last match": (RegexAnswer(pattern=r"= *(\d+)"), "x = 3, y = 14", "14"),
    "regex, no match": (RegexAnswer(pattern=r"= *(\d+)"), "none", None),
    "regex, group left out": (RegexAnswer(pattern=r"a(b)?"), "a", None),
}


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    ("config", "text"),
    [(BoxedAnswer(), "\\boxed{" * 100_000), (TaggedAnswer(), "<answer>" * 100_000)],
    ids=["boxed", "tag"],
)
def test_a_completion_that_repeats_itself_takes_no_longer_than_its_length(config, text):
    assert build_extractor(config)(text) is None


@pytest.mark.parametrize(("config", "text", "expected"), CASES.values(), ids=CASES.keys())
def test_answers_are_found(config, text, expected):
    assert build_extractor(config)(text) == expected
