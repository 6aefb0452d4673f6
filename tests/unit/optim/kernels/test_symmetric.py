"""QuACK's calling convention against stand-ins: which operand is transposed, which layout."""

import sys
from types import ModuleType

import pytest
import torch

from tests.unit.optim.kernels.machines import CUDA, fake_machine
from trainer.optim.kernels import KernelChoice, choose_kernel, launch_counts, reset_launch_counts
from trainer.optim.kernels.normalize import normalized_copy
from trainer.optim.kernels.products import Target
from trainer.optim.kernels.symmetric import Tiles, quack_products
from trainer.optim.newton_schulz import newton_schulz, newton_schulz_flops, update_weights_


def contiguous_dims(*tensors):
    return all(tensor is None or 1 in tensor.stride()[-2:] for tensor in tensors)


def gemm_symmetric(
    A, B, D, C, tile_count_semaphore, tile_M, tile_N, cluster_M, cluster_N, *,
    pingpong, persistent, is_dynamic_persistent, alpha=1.0, beta=1.0,
):  # fmt: skip
    """quack.gemm_symmetric.gemm_symmetric: D = alpha·A·Bᵀ + beta·C, one triangle mirrored."""
    assert tile_M * cluster_M == tile_N * cluster_N, "a cluster covers a square"
    assert tile_M <= 128 or A.stride(-1) == 1, "of column-major operands it cannot be compiled"
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


class Interface:
    """quack.gemm_interface, at tiles of QuACK's own."""

    @staticmethod
    def gemm(A, B, *, out, tuned):
        gemm_add(A, B, None, out, 0.0, tuned)

    @staticmethod
    def gemm_add(A, B, C, *, out, beta, tuned):
        gemm_add(A, B, C, out, beta, tuned)

    @staticmethod
    def gemm_symmetric(A, B, C=None, *, out, alpha=1.0, beta=1.0):
        product = alpha * (A.float() @ B.float())
        product = product if C is None else product + beta * C.float()
        out.copy_((product.tril() + product.tril(-1).mT).to(out.dtype))


def gemm_add(A, B, C, out, beta, tuned):
    assert not tuned, "the autotuner takes a minute a shape"
    assert contiguous_dims(A, B, C, out)
    product = A.float() @ B.float()
    out.copy_((product if C is None else product + beta * C.float()).to(out.dtype))


class Epilogue:
    """quack.epilogue.frontend.EpiMod: D = function(A·B, C, operands)["D"]."""

    def __init__(self, function):
        self.function = function

    def gemm(
        self, A, B, D, C, *, epi_args, b_kn,
        tile_count_semaphore, tile_M, tile_N, cluster_M, cluster_N,
        pingpong, persistent, is_dynamic_persistent,
    ):  # fmt: skip
        assert b_kn
        assert contiguous_dims(A, B, D, C, epi_args["x"])
        assert C.stride(-1) == D.stride(-1) == epi_args["x"].stride(-1) == 1
        operands = {
            name: value.float() if name == "x" else value for name, value in epi_args.items()
        }
        D.copy_(self.function(A.float() @ B.float(), C, **operands)["D"])


def gemm_epilogue(ops):
    assert set(ops) == {"x", "beta", "kept", "step_size"}
    return Epilogue


@pytest.fixture
def quack(monkeypatch):
    modules = {"quack": {}, "quack.gemm": {"gemm": gemm}, "quack.epilogue": {}}
    modules["quack.gemm_symmetric"] = {"gemm_symmetric": gemm_symmetric}
    modules["quack.gemm_interface"] = {
        "gemm": Interface.gemm,
        "gemm_add": Interface.gemm_add,
        "gemm_symmetric": Interface.gemm_symmetric,
    }
    modules["quack.epilogue.frontend"] = {"gemm_epilogue": gemm_epilogue}
    modules["quack.epilogue.ops"] = {"Scalar": str, "TileLoad": str}
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    forget_quack()
    yield
    forget_quack()


def forget_quack():
    """Let what was imported against one QuACK be imported anew."""
    quack_products.cache_clear()
    sys.modules.pop("trainer.optim.kernels.weight_update", None)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)], ids=str)
@pytest.mark.parametrize("kernel", ["symmetric", "gram"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(3, 96, 208), (3, 208, 96), (2, 32, 32)], ids=str)
def test_quack_products_give_what_dense_gives(quack, capability, kernel, dtype, shape):
    machine = fake_machine(capability=capability)
    choice = choose_kernel(kernel, shape=shape, dtype=dtype, device=CUDA, machine=machine)
    assert choice.fuses_update == (capability[0] == 9)
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


@pytest.mark.parametrize("kernel", ["symmetric", "gram"])
@pytest.mark.parametrize("shape", [(3, 96, 208), (3, 208, 96), (3, 32, 32)], ids=str)
def test_the_last_product_updates_weights(quack, kernel, shape):
    choice = choose_kernel(
        kernel, shape=shape, dtype=torch.bfloat16, device=CUDA, machine=fake_machine()
    )
    assert choice.fuses_update
    generator = torch.Generator().manual_seed(1)
    X_BMN, weights_BMN = (torch.randn(shape, generator=generator) for _ in range(2))
    factors = torch.tensor([0.9]), torch.tensor([0.5])
    targets = [
        Target(weights_BMN[:2].clone(), *factors),
        Target(weights_BMN[2:].clone(), torch.ones(1), torch.zeros(1)),
    ]
    update_BMN = newton_schulz(X_BMN, dtype=torch.bfloat16, kernel=choice)
    reset_launch_counts()
    update_weights_(normalized_copy(X_BMN, torch.bfloat16), targets, kernel=choice)
    assert launch_counts()["quack.weight_update"] == 2
    expected_BMN = 0.9 * weights_BMN[:2] - 0.5 * update_BMN[:2].float()
    # What the pass apart rounds to bfloat16 is not rounded here.
    torch.testing.assert_close(targets[0].weights_BMN, expected_BMN, rtol=0, atol=2**-10)
    assert torch.equal(targets[1].weights_BMN, weights_BMN[2:])


@pytest.mark.parametrize("shape", [(2, 96, 208), (2, 208, 96), (2, 96, 96)], ids=str)
def test_large_tiles_are_for_row_major_operands(quack, shape):
    products = quack_products((9, 0), Tiles(large_rows=64))
    choice = KernelChoice("symmetric", "a test's", True, lambda: products)
    X_BMN = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    result = newton_schulz(X_BMN, dtype=torch.bfloat16, kernel=choice)
    assert torch.linalg.vector_norm(result - newton_schulz(X_BMN, kernel="dense")) < 2e-2 * 96**0.5


def test_halved_products_are_priced_at_half():
    shape = (2, 64, 64)
    machine = fake_machine()
    half = choose_kernel(
        "symmetric", shape=shape, dtype=torch.bfloat16, device=CUDA, machine=machine
    )
    full = choose_kernel("dense", shape=shape, dtype=torch.bfloat16, device=CUDA, machine=machine)
    assert newton_schulz_flops(shape, kernel=full) == 2 * 5 * 3 * 2 * 64**3
    assert newton_schulz_flops(shape, kernel=half) == 2 * 5 * 2 * 2 * 64**3
