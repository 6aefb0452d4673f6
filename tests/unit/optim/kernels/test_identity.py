"""Adding a multiple of the identity: rounded once, in place or not, and the same in one launch."""

import pytest
import torch

from trainer.optim.kernels.identity import add_identity


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_it_is_rounded_once(dtype):
    Z_BMM = torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected_BMM = (Z_BMM.double() + 4.0848 * torch.eye(5, dtype=torch.float64)).to(dtype)
    out_BMM = torch.empty_like(Z_BMM)
    add_identity(Z_BMM, 4.0848, out_BMM)
    # In fp32 sums, where the dtype is narrower.
    torch.testing.assert_close(
        out_BMM, expected_BMM, rtol=1e-6 if dtype != torch.bfloat16 else 0, atol=0
    )
    add_identity(Z_BMM, 4.0848, Z_BMM)
    assert torch.equal(Z_BMM, out_BMM)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("M", [7, 300])
def test_one_launch_gives_the_same_bits(dtype, M):
    pytest.importorskip("triton")
    from trainer.optim.kernels import identity_triton

    if type(identity_triton._copy_kernel).__name__ != "InterpretedFunction":
        pytest.skip("needs TRITON_INTERPRET=1; on a GPU test_kernels_gpu.py does it")
    Z_BMM = torch.randn(2, M, M, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected_BMM, out_BMM = torch.empty_like(Z_BMM), torch.empty_like(Z_BMM)
    add_identity(Z_BMM, 4.0848, expected_BMM)
    identity_triton.launch_add_identity(Z_BMM, 4.0848, out_BMM)
    assert torch.equal(out_BMM, expected_BMM)
    identity_triton.launch_add_identity(Z_BMM, 4.0848, Z_BMM)
    assert torch.equal(Z_BMM, expected_BMM)
