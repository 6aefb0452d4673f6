import pytest
import torch

from trainer.optim.kernels.launches import launch_counts, reset_launch_counts
from trainer.optim.kernels.normalize import normalized_copy

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


def normal(*shape, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device)


def layouts(X_BMN):
    return {
        "row-major": X_BMN,
        "column-major": X_BMN.mT,
        "every other matrix": X_BMN[::2],
        "part of the rows": X_BMN[:, :7],
        "part of the columns": X_BMN[:, :, 3:],
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("target", DTYPES, ids=str)
def test_every_matrix_is_divided_by_its_frobenius_norm(device, source, target):
    X_BMN = normal(4, 12, 40, device=device).to(source)
    X_BMN[2] = 0
    for name, view in layouts(X_BMN).items():
        result = normalized_copy(view, target)
        wide = view.double()
        norm = torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True)
        expected = wide / torch.where(norm == 0, 1.0, norm)
        assert result.dtype == target, name
        # One rounding of entries below 1; fp16 also has its smallest step, 2^-24.
        allowed = torch.finfo(target).eps * expected.abs().max().item() + 2.0**-24
        torch.testing.assert_close(result.double(), expected, atol=allowed, rtol=0, msg=name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("M", [1, 3, 600])
def test_sizes_beyond_one_block_and_one_chunk_are_summed_whole(device, M):
    X_BMN = normal(2, M, 1001, device=device)
    result = normalized_copy(X_BMN, torch.float32)
    norms_B = torch.linalg.vector_norm(result.double(), dim=(-2, -1))
    torch.testing.assert_close(norms_B, torch.ones_like(norms_B), atol=1e-6, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exponent", [-100, -40, 40, 120])
@pytest.mark.parametrize("target", DTYPES, ids=str)
def test_powers_of_two_change_no_bit(device, exponent, target):
    X_BMN = normal(3, 8, 24, device=device)
    scaled = normalized_copy(X_BMN * 2.0**exponent, target)
    assert torch.equal(scaled, normalized_copy(X_BMN, target))


@pytest.mark.parametrize("device", DEVICES)
def test_the_ends_of_fp32_are_normalized(device):
    for value in (torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny):
        X_BMN = torch.full((2, 4, 16), value, device=device)
        expected = torch.full_like(X_BMN, 1 / 8)
        torch.testing.assert_close(normalized_copy(X_BMN, torch.float32), expected)


@pytest.mark.parametrize("target", [torch.float64, *DTYPES], ids=str)
@pytest.mark.parametrize("scale", [5e-324, 1e-310, 1e-300, 1e-39, 1e39, 1e300, 1e307])
def test_float64_is_normalized_beyond_the_range_of_fp32(scale, target):
    X_BMN = normal(3, 8, 24).double().round().clamp(-4, 4) * 2
    expected = normalized_copy(X_BMN, target)
    assert expected.abs().amax() > 0
    tolerance = dict(atol=1e-12, rtol=1e-12) if target == torch.float64 and scale > 1e-305 else {}
    torch.testing.assert_close(normalized_copy(X_BMN * scale, target), expected, **tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_dense_matrices_take_the_fused_kernels():
    reset_launch_counts()
    stack = normal(4, 12, 40, device="cuda")
    for view in (stack, stack.mT, stack[::2], stack[:, :7]):
        normalized_copy(view, torch.bfloat16)
    assert launch_counts()["triton.normalize"] == 4
    normalized_copy(stack[:, :, 3:], torch.bfloat16)
    assert launch_counts()["triton.normalize"] == 4
