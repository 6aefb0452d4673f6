import math

import pytest
import torch

from trainer.optim.adamw import AdamWSettings, AdamWTensors, adamw_step_

SETTINGS = AdamWSettings(0.1, 0.9, 0.95, 1e-8, 0.3, cautious_wd=False)


def tensors(dtype=torch.float32, state_dtype=None):
    generator = torch.Generator().manual_seed(1)
    weight, gradient = (torch.randn(4, 3, generator=generator).to(dtype) for _ in range(2))
    state = torch.zeros(4, 3, dtype=state_dtype or dtype)
    return AdamWTensors(weight, gradient, state, state.clone(), torch.zeros(()))


def reference(weight, gradient, num_steps, settings):
    w, g = weight.double(), gradient.double()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t in range(1, num_steps + 1):
        m = settings.beta1 * m + (1 - settings.beta1) * g
        v = settings.beta2 * v + (1 - settings.beta2) * g * g
        kept = (m * w >= 0).double() if settings.cautious_wd else 1.0
        denominator = v.sqrt() / math.sqrt(1 - settings.beta2**t) + settings.epsilon
        step = settings.lr / (1 - settings.beta1**t) * m / denominator
        w = w - settings.lr * settings.weight_decay * w * kept - step
    return w


@pytest.mark.parametrize("cautious_wd", [False, True], ids=["plain", "cautious"])
@pytest.mark.parametrize("gate", [None, torch.tensor(True)], ids=["no gate", "open"])
def test_three_steps_equal_the_recurrence(cautious_wd, gate) -> None:
    settings = AdamWSettings(0.1, 0.9, 0.95, 1e-8, 0.3, cautious_wd)
    one = tensors()
    expected = reference(one.weight, one.gradient, 3, settings)
    for _ in range(3):
        adamw_step_([one], settings, gate)
    assert (one.weight - expected).norm() / expected.norm() < 1e-6
    assert one.step == 3


def test_float32_state_beside_bfloat16_weights() -> None:
    one = tensors(torch.bfloat16, torch.float32)
    expected = reference(one.weight, one.gradient, 1, SETTINGS)
    adamw_step_([one], SETTINGS, None)
    # One rounding to bfloat16.
    assert (one.weight - expected).norm() / expected.norm() < 2**-8


def test_an_empty_shard_counts_steps() -> None:
    empty = torch.zeros(0, 3)
    one = AdamWTensors(empty, empty, empty, empty, torch.zeros(()))
    adamw_step_([one], SETTINGS, torch.tensor(True))
    assert one.step == 1


@pytest.mark.parametrize("cautious_wd", [False, True], ids=["plain", "cautious"])
@pytest.mark.parametrize(
    ("weight_layout", "gradient_layout"),
    [("columns", "rows"), ("columns", "columns"), ("rows", "repeated"), ("every other", "rows")],
)
def test_elements_are_paired_by_place_whatever_the_strides(
    weight_layout, gradient_layout, cautious_wd
) -> None:
    settings = AdamWSettings(0.1, 0.9, 0.95, 1e-8, 0.3, cautious_wd)
    one = tensors()
    gradient = one.gradient[:, :1].expand(4, 3) if gradient_layout == "repeated" else one.gradient
    weight = laid_out(one.weight, weight_layout)
    strided = AdamWTensors(
        weight,
        gradient if gradient_layout == "repeated" else laid_out(gradient, gradient_layout),
        torch.zeros_like(weight),
        torch.zeros_like(weight),
        torch.zeros(()),
    )
    expected = reference(one.weight, gradient, 2, settings)
    for _ in range(2):
        adamw_step_([strided], settings, torch.tensor(True))
    assert (weight - expected).norm() / expected.norm() < 1e-6


def laid_out(values, layout):
    """Return equal values in other memory."""
    rows, cols = values.shape
    match layout:
        case "rows":
            return values.clone()
        case "columns":
            return values.T.clone().T
    return torch.zeros(rows, 2 * cols)[:, ::2].copy_(values)


def test_float32_weights_keep_their_precision_beside_a_bfloat16_state() -> None:
    one = tensors(torch.float32, torch.bfloat16)
    expected = reference(one.weight, one.gradient, 1, SETTINGS)
    adamw_step_([one], SETTINGS, None)
    # The first step is the gradient's sign, which rounding of the state does not change.
    assert (one.weight - expected).norm() / expected.norm() < 1e-6
    assert one.momentum.dtype == one.variance.dtype == torch.bfloat16
