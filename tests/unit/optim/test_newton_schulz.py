import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils.flop_counter import FlopCounterMode

from tests.support.sharding import distribute
from tests.support.threads import run_threads
from trainer.errors import UserError
from trainer.optim.coefficients import resolve_coefficients
from trainer.optim.kernels import choose_kernel
from trainer.optim.kernels.inputs import hard_inputs
from trainer.optim.newton_schulz import (
    newton_schulz,
    newton_schulz_flops,
    newton_schulz_symmetric,
    newton_schulz_workspace_bytes,
)

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KERNELS = ["dense", "gram"]
SHAPES = [(64, 64), (48, 80), (96, 208), (32, 128)]
NUM_SEEDS = 4


def relative_error(result, reference):
    difference = torch.linalg.vector_norm(result.double() - reference, dim=(-2, -1))
    return difference / torch.linalg.vector_norm(reference, dim=(-2, -1))


def hard_stack(M, N, seed=0):
    return torch.stack(list(hard_inputs(M, N, seed=seed).values()))


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- the polynomial ---------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["quintic", "polar_express", "keller_jordan", [(1.5, -0.5, 0.0)]])
@pytest.mark.parametrize("steps", range(1, 9))
def test_singular_values_follow_the_polynomials_step_by_step(table, steps):
    values = torch.tensor([1.0, 0.5, 0.1, 1e-3, 0.0], dtype=torch.float64)
    expected = values / values.norm()
    for a, b, c in resolve_coefficients(table, steps):
        expected = a * expected + b * expected**3 + c * expected**5
    left = torch.linalg.qr(normal(5, 5).double()).Q
    right = torch.linalg.qr(normal(9, 5, seed=1).double()).Q
    result = newton_schulz(
        left * values @ right.mT, steps=steps, coefficients=table, kernel="dense"
    )
    # fp64 throughout: only the amplification of rounding by at most 8.3^8 at zero remains.
    torch.testing.assert_close(left.mT @ result @ right, torch.diag(expected), atol=1e-9, rtol=0)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("M", "N"), SHAPES)
def test_every_kernel_is_tame_and_as_exact_as_dense_on_hard_inputs(kernel, dtype, M, N):
    stack_SBMN = torch.stack([hard_stack(M, N, seed=seed) for seed in range(NUM_SEEDS)])
    reference = newton_schulz(stack_SBMN, dtype=torch.float64, kernel="dense")
    dense = newton_schulz(stack_SBMN, dtype=dtype, kernel="dense")
    result = newton_schulz(stack_SBMN, dtype=dtype, kernel=kernel)
    assert result.dtype == dtype
    assert torch.linalg.matrix_norm(result.double(), 2).max() <= 1.2
    # Means over seeds: on one large row the error is that of a single number, which is luck.
    allowed_B = 1.03 * relative_error(dense, reference).mean(0)
    assert (relative_error(result, reference).mean(0) <= allowed_B).all()


@pytest.mark.parametrize(
    ("dtype", "allowed"),
    # Those of anchors on a GPU: 5.8e-3 bf16, 0.8e-3 fp16; fp32 is 2^-24 times the amplification.
    [(torch.float32, 2e-6), (torch.bfloat16, 8e-3), (torch.float16, 1.1e-3)],
    ids=str,
)
def test_gaussian_error_is_that_of_the_dtype(dtype, allowed):
    X_MN = normal(96, 192)
    reference_MN = newton_schulz(X_MN, dtype=torch.float64)
    assert relative_error(newton_schulz(X_MN, dtype=dtype), reference_MN) <= allowed


# --- invariances ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=15, deadline=None)
@given(exponent=st.integers(-118, 120), sign=st.sampled_from([-1.0, 1.0]))
def test_a_power_of_two_and_a_sign_change_nothing(dtype, kernel, exponent, sign):
    X_BMN = normal(2, 8, 24)
    result = newton_schulz(X_BMN * sign * 2.0**exponent, dtype=dtype, kernel=kernel)
    assert torch.equal(result, sign * newton_schulz(X_BMN, dtype=dtype, kernel=kernel))


@settings(max_examples=25, deadline=None)
@given(factor=st.floats(1.1754943508222875e-38, 1e37), seed=st.integers(0, 3))
def test_any_positive_factor_changes_only_the_rounding_of_the_input(factor, seed):
    X_MN = normal(6, 18, seed=seed).clamp(-4, 4).round(decimals=1)
    X_MN = torch.where(X_MN == 0, 1.0, X_MN)
    # Tenths up to 4: every product with the factor is at least a tenth of a normal number.
    result = newton_schulz(X_MN * (10 * factor), dtype=torch.float32)
    torch.testing.assert_close(result, newton_schulz(X_MN), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("extreme", ["tiny", "max"])
def test_sixteen_bit_inputs_at_the_ends_of_their_range_are_normalized(dtype, extreme):
    largest = getattr(torch.finfo(dtype), extreme)
    X_MN = normal(16, 48).sign() * largest
    expected = newton_schulz(X_MN.sign(), dtype=dtype)
    assert torch.equal(newton_schulz(X_MN.to(dtype), dtype=dtype), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=10, deadline=None)
@given(scale=st.sampled_from([0.0, 1e-30, 1.0, 1e30, float("inf"), float("nan")]))
def test_a_matrix_does_not_depend_on_its_neighbours(dtype, kernel, scale):
    stack_BMN = normal(3, 8, 24)
    expected_BMN = newton_schulz(stack_BMN, dtype=dtype, kernel=kernel)
    stack_BMN[1] *= scale
    result_BMN = newton_schulz(stack_BMN, dtype=dtype, kernel=kernel)
    assert torch.equal(result_BMN[0], expected_BMN[0])
    assert torch.equal(result_BMN[2], expected_BMN[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("M", "N"), [(16, 40), (40, 16), (24, 24)])
def test_a_matrix_does_not_depend_on_the_size_of_its_batch(dtype, kernel, M, N):
    stack_BMN = normal(5, M, N)
    together = newton_schulz(stack_BMN, dtype=dtype, kernel=kernel)
    alone = torch.stack([newton_schulz(X, dtype=dtype, kernel=kernel) for X in stack_BMN])
    # Not bitwise everywhere: a library may sum one matrix in another order than a batch.
    allowed = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(together, alone, atol=allowed, rtol=0)


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=15, deadline=None)
@given(M=st.integers(1, 12), N=st.integers(1, 12), seed=st.integers(0, 9))
def test_the_transpose_gives_the_transpose(kernel, M, N, seed):
    X_MN = normal(M, N, seed=seed)
    result = newton_schulz(X_MN, kernel=kernel)
    torch.testing.assert_close(newton_schulz(X_MN.mT, kernel=kernel), result.mT, atol=2e-5, rtol=0)


# --- zeros, edges, layouts --------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_stays_zero_alone_and_in_a_stack(kernel, dtype):
    stack_BMN = normal(4, 8, 16)
    stack_BMN[2] = 0
    result_BMN = newton_schulz(stack_BMN, dtype=dtype, kernel=kernel)
    assert torch.equal(result_BMN[2], torch.zeros(8, 16, dtype=dtype))
    assert result_BMN.isfinite().all()
    assert torch.equal(
        newton_schulz(torch.zeros(8, 8), dtype=dtype), torch.zeros(8, 8, dtype=dtype)
    )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", [(0, 4, 6), (3, 0, 6), (3, 4, 0), (0, 0), (2, 0, 4, 6)], ids=str)
def test_empty_stacks_and_shards_come_back_empty(kernel, shape):
    result = newton_schulz(torch.empty(shape), dtype=torch.bfloat16, kernel=kernel)
    assert result.shape == shape
    assert result.dtype == torch.bfloat16


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", [(1, 7), (7, 1), (1, 1), (3, 1, 9)], ids=str)
def test_a_matrix_of_one_row_becomes_its_direction(kernel, shape):
    X = normal(*shape)
    result = newton_schulz(X, steps=5, kernel=kernel)
    size = torch.tensor(1.0, dtype=torch.float64)
    for a, b, c in resolve_coefficients("quintic", 5):
        size = a * size + b * size**3 + c * size**5
    expected = X / torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True) * size
    torch.testing.assert_close(result, expected.float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(8, 16), (16, 8)], ids=str)
def test_the_input_is_not_written(kernel, source, dtype, shape):
    X = normal(*shape).to(source)
    before = X.clone()
    result = newton_schulz(X, dtype=dtype, kernel=kernel)
    result.zero_()
    assert torch.equal(X, before)


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3)], ids=str)
def test_leading_dims_are_kept(leading):
    X = normal(*leading, 6, 10)
    result = newton_schulz(X)
    assert result.shape == X.shape
    last = (-1,) * len(leading)
    torch.testing.assert_close(result[last], newton_schulz(X[last]), atol=1e-6, rtol=0)


def test_strided_views_give_what_their_copies_give():
    fused_BFD = normal(3, 16, 20)
    for view in (fused_BFD[:, 8:], fused_BFD[:, :, ::2], fused_BFD.mT[:, 4:], fused_BFD[::2]):
        torch.testing.assert_close(
            newton_schulz(view), newton_schulz(view.contiguous()), atol=1e-6, rtol=0
        )


def test_the_result_has_no_gradient_and_takes_a_parameter():
    parameter = torch.nn.Parameter(normal(4, 8))
    assert not newton_schulz(parameter).requires_grad


# --- precision --------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_float32_is_ieee_and_the_global_setting_survives(precision):
    X_MN = normal(64, 64)
    expected = newton_schulz(X_MN)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert torch.equal(newton_schulz(X_MN), expected)
        assert torch.get_float32_matmul_precision() == precision
        assert torch.backends.cuda.matmul.allow_tf32 == (precision != "highest")
    finally:
        torch.set_float32_matmul_precision(before)


# --- cost -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("M", "N"), [(96, 208), (32, 48), (16, 16)])
def test_flops_are_those_counted_and_equal_for_the_transpose(kernel, M, N):
    choice = choose_kernel(kernel, shape=(2, M, N), dtype=torch.bfloat16, device=CPU)
    counted = []
    for shape in ((2, M, N), (2, N, M)):
        with FlopCounterMode(display=False) as counter:
            newton_schulz(normal(*shape), dtype=torch.bfloat16, kernel=choice)
        counted.append(counter.get_total_flops())
        assert newton_schulz_flops(shape, kernel=choice) == counter.get_total_flops()
    assert counted[0] == counted[1]


def test_workspace_counts_two_matrices_and_the_squares():
    dense = choose_kernel("dense", shape=(3, 8, 32), dtype=torch.bfloat16, device=CPU)
    gram = choose_kernel("gram", shape=(3, 96, 200), dtype=torch.bfloat16, device=CPU)
    assert newton_schulz_workspace_bytes((3, 8, 32), kernel=dense) == 3 * 2 * (2 * 256 + 2 * 64)
    assert newton_schulz_workspace_bytes((3, 200, 96), kernel=gram) == 3 * 2 * (
        2 * 96 * 200 + 4 * 96 * 96
    )
    from_fp32 = newton_schulz_workspace_bytes((8, 32), kernel=dense, input_dtype=torch.float32)
    assert from_fp32 == 256 * (4 + 2)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 32, 33), (96, 208)], ids=str)
def test_rows_without_a_fifth_power_never_read_stale_memory(kernel, dtype, shape):
    X, rows = normal(*shape), [(1.5, -0.5, 0.0)]
    exact = newton_schulz(X.double(), coefficients=rows, kernel="dense")
    result = newton_schulz(X, coefficients=rows, dtype=dtype, kernel=kernel)
    # A few roundings of iterates of norm 1.
    allowed = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    assert (result.double() - exact).norm() <= allowed * exact.norm()


# --- refusals ---------------------------------------------------------------------------------


def test_what_is_not_a_stack_of_float_matrices_is_a_type_error():
    with pytest.raises(TypeError, match=r"shape \(3,\)"):
        newton_schulz(torch.zeros(3))
    with pytest.raises(TypeError, match=r"torch\.int64"):
        newton_schulz(torch.zeros(3, 3, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"not torch\.float8_e4m3fn: convert it first"):
        newton_schulz(torch.zeros(3, 3).to(torch.float8_e4m3fn), dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"dtype=torch\.int32"):
        newton_schulz(torch.zeros(3, 3), dtype=torch.int32)
    with pytest.raises(TypeError, match="dtype='bfloat16' is not one of torch"):
        newton_schulz(torch.zeros(3, 3), dtype="bfloat16")
    with pytest.raises(TypeError, match=r"takes dense matrices, not torch\.sparse_coo"):
        newton_schulz(torch.eye(3).to_sparse())
    with pytest.raises(TypeError, match="takes a plain tensor, not a list"):
        newton_schulz([[1.0]])


def orthogonalize_a_shard() -> None:
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(TypeError, match="takes a plain tensor, not a DTensor"):
        newton_schulz(distribute(torch.ones(4, 4), mesh, (Shard(0),)))


def test_a_shard_is_no_matrix():
    run_threads(2, orthogonalize_a_shard)


@pytest.mark.parametrize("kernel", ["fast", None, 5])
def test_an_unknown_kernel_is_refused_by_name(kernel):
    with pytest.raises(UserError, match=f'optim.kernel="{kernel}": not a kernel; give one of'):
        newton_schulz(normal(3, 3), kernel=kernel)


def test_no_steps_are_refused():
    with pytest.raises(UserError, match=r"optim\.ns_steps=0"):
        newton_schulz(normal(3, 3), steps=0)


def test_the_symmetric_function_refuses_a_cpu():
    with pytest.raises(UserError, match=r'optim\.kernel="symmetric" cannot run .* found cpu'):
        newton_schulz_symmetric(normal(16, 16), 1e-7)
