import copy

import pytest
import torch
from torch import nn

from trainer.optim.torch_optimizers import SGD, AdamW


def parameters():
    generator = torch.Generator().manual_seed(0)
    found = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (5,))]
    for parameter in found:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return found


PAIRS = [
    pytest.param(
        lambda p: AdamW(p, lr=0.1, betas=(0.8, 0.9), epsilon=1e-6, weight_decay=0.2),
        lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2),
        id="adamw",
    ),
    pytest.param(
        lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.2, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.2, nesterov=True),
        id="sgd with momentum",
    ),
    pytest.param(lambda p: SGD(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1), id="sgd"),
]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_steps_are_torchs(ours, theirs) -> None:
    first, second = parameters(), parameters()
    mine, reference = ours(first), theirs(second)
    for _ in range(3):
        mine.step(finite=torch.tensor(True))
        reference.step()
    for a, b in zip(first, second, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("num_before", [0, 2])
def test_a_non_finite_step_changes_nothing(ours, theirs, num_before) -> None:
    found = parameters()
    optimizer = ours(found)
    for _ in range(num_before):
        optimizer.step(finite=torch.tensor(True))
    before = copy.deepcopy([(p.detach(), optimizer.state[p]) for p in found])
    gradients = [p.grad.clone() for p in found]
    found[0].grad[0, 0] = float("nan")
    optimizer.step(finite=torch.tensor(False))
    assert not optimizer.settle()
    for parameter, (weight, state) in zip(found, before, strict=True):
        assert torch.equal(parameter, weight)
        for key, value in state.items():
            assert torch.equal(optimizer.state[parameter][key], value)
    for parameter, gradient in zip(found, gradients, strict=True):
        parameter.grad.copy_(gradient)
    optimizer.step(finite=torch.tensor(True))
    assert optimizer.settle()
    twin = parameters()
    straight = theirs(twin)
    for _ in range(num_before + 1):
        straight.step()
    assert torch.allclose(found[0], twin[0], atol=1e-6)


def test_states_are_torchs_own_both_ways() -> None:
    first, second = parameters(), parameters()
    ours, theirs = AdamW(first), torch.optim.AdamW(second)
    ours.step()
    theirs.step()
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    ours.load_state_dict(
        copy.deepcopy(torch.optim.AdamW(parameters()).state_dict())
        | {"state": copy.deepcopy(theirs.state_dict()["state"])}
    )
    assert ours.state[first[0]]["step"] == 1


def test_phase_times_name_the_update_alone() -> None:
    optimizer = AdamW(parameters())
    optimizer.step()
    assert set(optimizer.phase_times()()) == {"optim/update_ms"}
    assert set(optimizer.timings()) == {"optim/update_ms"}
