import pytest
import torch

from trainer.model.finite import non_finite_names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_names_what_is_not_finite(dtype: torch.dtype, bad: float):
    spoilt = torch.zeros(3, 5, dtype=dtype)
    spoilt[2, 4] = bad
    tensors = {"good": torch.ones(2, dtype=dtype), "bad": spoilt, "empty": torch.empty(0, 3)}
    assert non_finite_names(tensors) == ["bad"]


def test_largest_finite_values_pass():
    largest = torch.finfo(torch.float32).max
    assert non_finite_names({"w": torch.tensor([largest, -largest])}) == []


def test_integers_and_nothing_pass():
    assert non_finite_names({"steps": torch.tensor(3)}) == []
    assert non_finite_names({}) == []
