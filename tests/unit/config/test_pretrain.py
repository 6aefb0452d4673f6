import pytest
from pydantic import ValidationError

from trainer.config.pretrain import PretrainDataConfig, PretrainValConfig


def test_validation_comes_from_one_place():
    with pytest.raises(ValidationError, match=r"source and fraction=0\.1 are both given"):
        PretrainValConfig.model_validate({"source": {"type": "stdlib"}, "fraction": 0.1})


@pytest.mark.parametrize(
    "source",
    [
        {"type": "stdlib", "path": "x"},
        {"type": "files", "path": "x", "weight": 0},
        {"type": "files", "path": "x", "weight": float("nan")},
        {"type": "files", "path": "x", "max_epochs": 0},
        {"type": "files", "path": "x", "suffixes": ()},
        {"type": "files", "path": "x", "on_bad_row": "ignore"},
        {"type": "files", "path": "x", "column": ""},
        {"type": "hub", "path": "x", "column": ""},
        {"type": "hub", "path": "x", "subset": ""},
        {"type": "hub", "path": "x", "split": ""},
        {"type": "tokens"},
        {"type": "reasoning_gym", "task": "spell_backward"},
        {"type": "mix", "sources": ()},
        {"type": "mix", "sources": ({"type": "mix", "sources": ({"type": "stdlib"},)},)},
    ],
    ids=str,
)
def test_a_source_that_means_nothing_is_refused(source):
    with pytest.raises(ValidationError):
        PretrainDataConfig.model_validate({"source": source})
