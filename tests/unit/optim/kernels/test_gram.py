import pytest
import torch

from trainer.optim.coefficients import TABLES, resolve_coefficients
from trainer.optim.kernels.gram import (
    ASPECTS,
    COMMITTED_SEGMENTS,
    gram_segments,
    simulate_segments,
)
from trainer.optim.kernels.inputs import hard_inputs
from trainer.optim.kernels.iteration import iterate
from trainer.optim.kernels.products import torch_products

QUINTIC = resolve_coefficients("quintic", 5)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_committed_table_is_what_the_simulation_gives(name, dtype):
    rows = resolve_coefficients(name, 5)
    simulated = tuple(simulate_segments(rows, dtype, aspect) for aspect in ASPECTS)
    assert simulated == COMMITTED_SEGMENTS[name][dtype]


def test_more_rows_are_fused_the_longer_the_matrix_in_either_orientation():
    assert gram_segments(QUINTIC, torch.bfloat16, 1536, 2047) == (1, 1, 1, 1, 1)
    assert gram_segments(QUINTIC, torch.bfloat16, 1536, 2048) == (2, 1, 1, 1)
    assert gram_segments(QUINTIC, torch.bfloat16, 2047, 1024) == (2, 1, 1, 1)
    assert gram_segments(QUINTIC, torch.bfloat16, 2048, 1024) == (2, 2, 1)


def test_small_matrices_fuse_the_first_pair_alone_whatever_their_aspect_ratio():
    assert gram_segments(QUINTIC, torch.bfloat16, 2048, 768) == (2, 1, 1, 1)
    assert gram_segments(QUINTIC, torch.float16, 96, 960) == (2, 1, 1, 1)


def test_float32_and_matrices_smaller_than_the_simulated_ones_fuse_nothing():
    assert gram_segments(QUINTIC, torch.float32, 96, 960) == (1, 1, 1, 1, 1)
    assert gram_segments(QUINTIC, torch.bfloat16, 95, 960) == (1, 1, 1, 1, 1)
    assert gram_segments(QUINTIC, torch.bfloat16, 1, 7) == (1, 1, 1, 1, 1)


def test_tables_of_the_user_are_simulated_and_long_ones_stay_single_at_the_end():
    rows = resolve_coefficients([(1.5, -0.5, 0.0)], 8)
    segments = gram_segments(rows, torch.bfloat16, 96, 192)
    assert sum(segments) == 8
    assert segments[-2:] == (1, 1)


def test_what_is_admitted_is_as_exact_in_real_arithmetic_and_what_is_not_is_worse():
    stack_BMN = torch.stack(list(hard_inputs(64, 128).values()))
    exact_BMN = iterate(stack_BMN.clone(), QUINTIC, (1,) * 5, torch_products())

    def errors(segments):
        result_BMN = iterate(stack_BMN.bfloat16(), QUINTIC, segments, torch_products())
        return torch.linalg.vector_norm(result_BMN.double() - exact_BMN, dim=(-2, -1))

    standard = errors((1,) * 5)
    # 3 %: the spread between random matrices of this size.
    assert (errors((2, 2, 1)) <= 1.03 * standard).all()
    assert (errors((1, 2, 2)) > 1.08 * standard).any()


@pytest.mark.parametrize("segments", [(1, 1, 1, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2)], ids=str)
@pytest.mark.parametrize("is_column_major", [False, True])
def test_every_grouping_is_the_same_polynomial(segments, is_column_major):
    X_BMN = torch.stack(list(hard_inputs(12, 30).values()))
    expected = iterate(X_BMN.clone(), QUINTIC, (1,) * 5, torch_products())
    start = X_BMN.mT.contiguous().mT if is_column_major else X_BMN.clone()
    result = iterate(start, QUINTIC, segments, torch_products())
    # fp64: 1e-16 amplified by the slope at zero, about 490.
    torch.testing.assert_close(result, expected, atol=1e-10, rtol=0)
    assert result.stride() == start.stride()
