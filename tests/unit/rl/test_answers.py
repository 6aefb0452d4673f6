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
    "no box": (BoxedAnswer(), "4", None),
    "regex, last match": (RegexAnswer(pattern=r"= *(\d+)"), "x = 3, y = 14", "14"),
    "regex, no match": (RegexAnswer(pattern=r"= *(\d+)"), "none", None),
    "regex, group left out": (RegexAnswer(pattern=r"a(b)?"), "a", None),
}


@pytest.mark.parametrize(("config", "text", "expected"), CASES.values(), ids=CASES.keys())
def test_answers_are_found(config, text, expected):
    assert build_extractor(config)(text) == expected
