import pytest
import torch
from torch import nn

from trainer.optim.adamw_groups import step_adamw_groups_
from trainer.optim.flight import StepInputs
from trainer.optim.state import init_state
from trainer.optim.timing import PhaseTimer

SETTINGS = {
    "lr": 0.1, "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-6, "weight_decay": 0.2,
    "cautious_wd": False, "algorithm": "adamw",
}  # fmt: skip


def weights():
    generator = torch.Generator().manual_seed(0)
    found = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (5,))]
    for weight in found:
        weight.grad = torch.randn(weight.shape, generator=generator)
    return found


def step(found, gates, algorithm="adamw") -> PhaseTimer:
    state = {weight: init_state(weight, "adamw") for weight in found}
    group = {**SETTINGS, "algorithm": algorithm, "params": found}
    momenta = [state[weight]["momentum"] for weight in found]
    timer = PhaseTimer(torch.device("cpu"))
    with torch.no_grad():
        step_adamw_groups_(
            StepInputs(found, momenta.__getitem__, [group], gates, None), state, timer
        )
    timer.end_step()
    return timer


def torchs(found):
    """Step with torch's AdamW; parameters without a gradient stay."""
    torch.optim.AdamW(
        found, lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2, foreach=False
    ).step()
    return found


@pytest.mark.parametrize("gate", [None, torch.tensor(True)], ids=str)
def test_a_group_is_stepped_as_by_torch(gate) -> None:
    found, expected = weights(), torchs(weights())
    timer = step(found, [gate, gate])
    for weight, other in zip(found, expected, strict=True):
        assert torch.allclose(weight, other, atol=1e-6)
    assert timer.last_step.read()["optim/update_ms"] > 0


@pytest.mark.parametrize("is_elsewhere", [True, False])
def test_a_gradient_that_is_missing_counts_as_zeros_if_another_rank_has_it(is_elsewhere) -> None:
    found, expected = weights(), weights()
    found[1].grad = None
    expected[1].grad = torch.zeros(5) if is_elsewhere else None
    step(found, [torch.tensor(True), torch.tensor(is_elsewhere)])
    for weight, other in zip(found, torchs(expected), strict=True):
        assert torch.allclose(weight, other, atol=1e-6)


def test_other_groups_are_left_alone() -> None:
    found, before = weights(), weights()
    step(found, [None, None], algorithm="muon")
    assert all(map(torch.equal, found, before))
