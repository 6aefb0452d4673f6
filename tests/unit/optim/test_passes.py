import pytest
import torch

from trainer.optim.passes import apply_updates_, directions, update_momentum_

OPEN, SHUT = torch.tensor(True), torch.tensor(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gate", [None, OPEN], ids=["no gate", "open"])
def test_momentum_is_updated_in_its_own_dtype(dtype, gate) -> None:
    m, g = torch.randn(2, 3).to(dtype), torch.randn(2, 3)
    expected = (m * 0.9).add(g.to(dtype))
    update_momentum_([m], [g], [gate], 0.9)
    assert torch.equal(m, expected)


def test_a_shut_gate_holds_back_nan() -> None:
    m, w, nan = torch.ones(2, 3), torch.ones(2, 3), torch.full((2, 3), float("nan"))
    update_momentum_([m], [nan], [SHUT], 0.9)
    for cautious in (False, True):
        apply_updates_([w], [nan], [SHUT], step_size=1.0, decay=0.5, cautious=cautious)
    assert torch.equal(m, torch.ones(2, 3))
    assert torch.equal(w, torch.ones(2, 3))


def test_a_missing_gradient_counts_as_zeros() -> None:
    m = torch.ones(2, 3)
    update_momentum_([m], [None], [OPEN], 0.5)
    assert torch.equal(m, torch.full((2, 3), 0.5))
    (u,) = directions([m], [None], [None], 0.5, nesterov=True)
    assert torch.equal(u, torch.full((2, 3), 0.25))


@pytest.mark.parametrize("gate", [None, OPEN], ids=["no gate", "open"])
def test_cautious_decay_spares_opposed_signs_and_not_zeros(gate) -> None:
    w, update = torch.tensor([2.0, 2.0, 2.0, -2.0]), torch.tensor([1.0, -1.0, 0.0, -1.0])
    apply_updates_([w], [update], [gate], step_size=0.0, decay=0.5, cautious=True)
    assert w.tolist() == [1.0, 2.0, 1.0, -1.0]


def test_a_strided_weight_is_written_where_it_lies() -> None:
    whole = torch.zeros(2, 4, 3)
    apply_updates_(
        [whole[:, 1:3]], [torch.ones(2, 2, 3)], [OPEN], step_size=1.0, decay=0.0, cautious=False
    )
    assert whole.sum() == -12
    assert not whole[:, ::3].any()
