"""QuACK's calling convention against stand-ins: which operand is transposed, which layout."""

import sys
from types import ModuleType

import pytest
import torch

from tests.unit.optim.kernels.machines import CUDA, fake_machine
from trainer.optim.kernels import choose_kernel, launch_counts, reset_launch_counts
from trainer.optim.newton_schulz import newton_schulz, newton_schulz_flops


def contiguous_dims(*tensors):
    return all(tensor is None or 1 in tensor.stride()[-2:] for tensor in tensors)


def gemm_symmetric(
    A, B, D, C, tile_count_semaphore, tile_M, tile_N, cluster_M, cluster_N, *,
    pingpong, persistent, is_dynamic_persistent, alpha=1.0, beta=1.0,
):  # fmt: skip
    """quack.gemm_symmetric.gemm_symmetric: D = alpha·A·Bᵀ + beta·C, one triangle mirrored."""
    assert tile_M * cluster_M == tile_N * cluster_N, "a cluster covers a square"
    assert contiguous_dims(A, B, D, C)
    assert D.is_contiguous()
    product = alpha * (A.float() @ B.float().mT)
    product = product if C is None else product + beta * C.float()
    D.copy_((product.tril() + product.tril(-1).mT).to(D.dtype))


def gemm(
    A, B, D, C, tile_count_semaphore, tile_M, tile_N, cluster_M, cluster_N, *,
    pingpong, persistent, is_dynamic_persistent, b_kn=False, beta=1.0,
):  # fmt: skip
    """quack.gemm.gemm: D = A·B (b_kn) or A·Bᵀ, plus beta·C."""
    assert contiguous_dims(A, B, D, C)
    product = A.float() @ (B.float() if b_kn else B.float().mT)
    D.copy_((product if C is None else product + beta * C.float()).to(D.dtype))


@pytest.fixture
def quack(monkeypatch):
    modules = {"quack": {}, "quack.gemm": {"gemm": gemm}}
    modules["quack.gemm_symmetric"] = {"gemm_symmetric": gemm_symmetric}
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("kernel", ["symmetric", "gram"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(3, 96, 208), (3, 208, 96), (2, 32, 32)], ids=str)
def test_quack_products_give_what_dense_gives(quack, kernel, dtype, shape):
    choice = choose_kernel(kernel, shape=shape, dtype=dtype, device=CUDA, machine=fake_machine())
    X_BMN = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    reset_launch_counts()
    result = newton_schulz(X_BMN, dtype=dtype, kernel=choice)
    assert launch_counts()["quack.gemm_symmetric"] >= 10
    assert launch_counts()["quack.gemm"] >= 3
    assert "torch.bmm" not in launch_counts()
    reference = newton_schulz(X_BMN, dtype=torch.float64, kernel="dense")
    dense = newton_schulz(X_BMN, dtype=dtype, kernel="dense")
    allowed = 1.1 * torch.linalg.vector_norm(dense - reference)
    assert torch.linalg.vector_norm(result - reference) <= allowed
    assert result.stride() == X_BMN.stride()


def test_halved_products_are_priced_at_half():
    shape = (2, 64, 64)
    machine = fake_machine()
    half = choose_kernel(
        "symmetric", shape=shape, dtype=torch.bfloat16, device=CUDA, machine=machine
    )
    full = choose_kernel("dense", shape=shape, dtype=torch.bfloat16, device=CUDA, machine=machine)
    assert newton_schulz_flops(shape, kernel=full) == 2 * 5 * 3 * 2 * 64**3
    assert newton_schulz_flops(shape, kernel=half) == 2 * 5 * 2 * 2 * 64**3
