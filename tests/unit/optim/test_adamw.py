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
