from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.support.meshes import one_rank_mesh
from trainer.parallel.clip import clip_gradients_


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with one_rank_mesh() as mesh:
        yield mesh


def with_gradients(*gradients: Tensor) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    return parameters


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("size", [1e20, 1.0, 1e-25, 1e-38], ids=["huge", "one", "tiny", "least"])
def test_norm_and_clipping_at_any_scale(size: float) -> None:
    parameters = with_gradients(torch.full((1000,), size), torch.full((10, 44), size))
    norm = clip_gradients_(parameters, max_norm=size)
    expected = (1440**0.5) * torch.tensor(size, dtype=torch.float32).item()
    assert norm.norm.item() == pytest.approx(expected, rel=1e-6)
    assert norm.finite
    clipped = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    assert clipped.double().norm().item() == pytest.approx(size, rel=1e-4)


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("max_norm", [None, 6.0], ids=["none", "above"])
def test_gradients_within_the_limit_are_left_alone(max_norm: float | None) -> None:
    parameters = with_gradients(torch.tensor([3.0, 4.0]), torch.zeros(0))
    parameters.append(nn.Parameter(torch.ones(3)))
    assert clip_gradients_(parameters, max_norm).norm.item() == 5.0
    assert torch.equal(parameters[0].grad, torch.tensor([3.0, 4.0]))  # pyright: ignore


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_gradients_are_flagged_and_left_alone(bad: float) -> None:
    parameters = with_gradients(torch.tensor([30.0, 40.0]), torch.tensor([bad]))
    assert not clip_gradients_(parameters, 1.0).finite
    assert torch.equal(parameters[0].grad, torch.tensor([30.0, 40.0]))  # pyright: ignore


@pytest.mark.usefixtures("mesh")
def test_no_gradients_at_all_give_norm_zero() -> None:
    norm = clip_gradients_([nn.Parameter(torch.ones(2))], 1.0)
    assert norm.norm.item() == 0.0
    assert norm.finite


def test_sharded_and_replicated_gradients_count_once(mesh: DeviceMesh) -> None:
    placements = [Replicate(), Shard(0), Shard(1)]
    sharded = nn.Parameter(DTensor.from_local(torch.zeros(2, 2), mesh, placements))
    sharded.grad = DTensor.from_local(torch.full((2, 2), 2.0), mesh, placements)
    norm = clip_gradients_([sharded, *with_gradients(torch.tensor([3.0]))], 1.0)
    assert norm.norm.item() == 5.0
    assert torch.allclose(sharded.grad.to_local(), torch.full((2, 2), 0.4))
