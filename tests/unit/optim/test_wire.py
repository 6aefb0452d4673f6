import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.optim.wire import TAIL, build_stack, pack, scale_into_, unpack

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SMALLEST = torch.finfo(torch.float32).tiny
LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=40, deadline=None)
@given(exponent=st.integers(-120, 120))
def test_scaling_by_a_power_of_two_is_exact(dtype, exponent) -> None:
    u = torch.tensor([[[1.0, -0.75], [0.5, 0.0]]]) * 2.0**exponent
    out = torch.empty(1, 2, 2, dtype=dtype)
    exponents = scale_into_(u, out)
    assert out.abs().max() == 0.5
    assert torch.equal(torch.ldexp(out.double(), exponents.double()), u.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [SMALLEST, LARGEST, -LARGEST], ids=str)
def test_the_ends_of_float32_survive(dtype, value) -> None:
    out = torch.empty(1, 1, 2, dtype=dtype)
    scale_into_(torch.tensor([[[value, 0.0]]]), out)
    assert 0.25 <= out.abs().max() <= 4
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("split_dim", [0, 1], ids=["rows", "columns"])
def test_slabs_of_any_scale_join_to_the_matrix_one_owner_would_scale(dtype, split_dim) -> None:
    matrix = torch.randint(-8, 9, (3, 6, 6)).float()
    pieces = list(matrix.split([1, 3, 2], dim=1 + split_dim))
    pieces = [p * s for p, s in zip(pieces, (2.0**-8, 2.0**100, 2.0**97), strict=True)]
    pieces[0] = torch.zeros_like(pieces[0])
    shapes = [(p.shape[1], p.shape[2]) for p in pieces]
    blocks = [pack([p], len(p), s, dtype) for p, s in zip(pieces, shapes, strict=True)]
    joined = unpack(blocks, shapes, split_dim).double()
    whole = torch.cat(pieces, dim=1 + split_dim).double()
    ratio = whole.abs().amax((1, 2)) / joined.abs().amax((1, 2))
    assert torch.equal(joined * ratio[:, None, None], whole)
    assert torch.equal(torch.frexp(ratio).mantissa, torch.full_like(ratio, 0.5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("exponent", [-126, -125, 125, 126, 127], ids=str)
def test_slabs_at_the_ends_of_float32_keep_their_ratios(dtype, exponent) -> None:
    pieces = [torch.full((1, 1, 2), 2.0 ** (exponent - step)) for step in (0, 1, 2, 3)]
    joined = unpack([pack([p], 1, (1, 2), dtype) for p in pieces], [(1, 2)] * 4, 0)
    assert torch.equal(joined[0, :, 0] / joined[0, 0, 0], torch.tensor([1, 0.5, 0.25, 0.125]))


def test_empty_slabs_carry_an_exponent_below_all_others() -> None:
    full = torch.rand(2, 3, 4)
    blocks = [pack([full], 2, (3, 4), torch.float32), pack([full[:, :0]], 2, (0, 4), torch.float32)]
    assert blocks[1].shape == (2, TAIL)
    joined = unpack(blocks, [(3, 4), (0, 4)], 0)
    assert torch.allclose(joined / joined.norm(), full / full.norm(), rtol=0.5)


def test_a_zero_matrix_stays_zero() -> None:
    block = pack([torch.zeros(1, 2, 2)], 1, (2, 2), torch.float16)
    assert torch.equal(unpack([block], [(2, 2)], 0), torch.zeros(1, 2, 2, dtype=torch.float16))


def test_a_float32_stack_is_a_plain_copy() -> None:
    u = torch.rand(2, 3, 4)
    stack = build_stack([u[:1], u[1:]], 2, (3, 4), torch.float32)
    assert torch.equal(stack, u)
    assert stack.data_ptr() != u.data_ptr()
