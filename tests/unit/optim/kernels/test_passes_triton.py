"""The passes by table equal those tensor by tensor, bit for bit, in Triton's interpreter."""

import pytest
import torch

from trainer.optim import Muon, MuonOptions
from trainer.optim.kernels import launch_counts, reset_launch_counts
from trainer.optim.passes import apply_updates_, directions, update_momentum_
from trainer.optim.wire import pack

pytest.importorskip("triton")

from trainer.optim.kernels import matrix_table
from trainer.optim.kernels.matrix_table import MatrixTable, Run, TableLayout

SHAPE = (40, 260)
"""Two and a half tiles a matrix."""
MU = 0.9
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.optim.kernels import passes_triton

    if not torch.cuda.is_available():
        if type(passes_triton.update_kernel).__name__ != "InterpretedFunction":
            pytest.skip("needs a GPU or TRITON_INTERPRET=1")
        monkeypatch.setattr(matrix_table, "find_kernels", lambda _: passes_triton)


def _tensors():
    """Return the local shards of two parameters, the second without a gradient."""
    torch.manual_seed(0)
    rows, cols = SHAPE
    momenta = [torch.randn(3, 2 * rows, cols, device=DEVICE), torch.randn(2, *SHAPE, device=DEVICE)]
    gradients = [torch.randn_like(momenta[0]), None]
    for tensor in (momenta[0], gradients[0]):
        tensor[1] *= 1e-30
        tensor[2] = 0.0
    return gradients, momenta, [torch.randn_like(m) for m in momenta]


def _table(gradients, momenta, weights, gate) -> MatrixTable:
    """Return the table of the upper half of each matrix of the first, and of all the second."""
    size = SHAPE[0] * SHAPE[1]
    layout = TableLayout([Run(0, 0, 3, 2 * size, 0, size), Run(1, 0, 2, size, 0, size)])
    table = layout.table(gradients, momenta, weights, [gate, gate])
    assert table is not None
    return table


def _upper(tensors):
    return [None if t is None else t[:, : SHAPE[0]] for t in tensors]


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("is_open", [None, True, False])
def test_passes_by_table_equal_those_by_tensor(nesterov: bool, is_open: bool | None) -> None:
    gate = None if is_open is None else torch.tensor(is_open, device=DEVICE)
    gradients, momenta, weights = _tensors()
    expected = [m.clone() for m in momenta], [w.clone() for w in weights]
    if is_open is False:
        gradients[0][0, 0, 0] = float("nan")
    update_momentum_(_upper(expected[0]), _upper(gradients), [gate, gate], MU)
    table = _table(gradients, momenta, weights, gate)
    kept = table.update_momentum_(mu=MU, nesterov=nesterov, keep="squares")
    for m, wanted in zip(momenta, expected[0], strict=True):
        assert torch.equal(m, wanted)
    found = directions(_upper(expected[0]), _upper(gradients), [gate] * 2, MU, nesterov=nesterov)
    u = torch.cat(list(found)).double()
    norm = torch.linalg.vector_norm(u, dim=(1, 2), keepdim=True)
    stack = table.normalized_stack(
        kept, slice(0, 5), SHAPE, torch.float32, mu=MU, nesterov=nesterov
    )
    # Finite behind a shut gate too, whatever the gradient holds.
    torch.testing.assert_close(stack.double(), u / norm.where(norm > 0, 1.0))
    assert not stack[2].any()
    update = torch.randn(5, *SHAPE, device=DEVICE).bfloat16()
    settings = {"step_size": 0.25, "decay": 0.125}
    apply_updates_(
        _upper(expected[1]), update.split([3, 2]), [gate, gate], cautious=False, **settings
    )
    table.apply_(update, slice(0, 5), **settings)
    for w, wanted in zip(weights, expected[1], strict=True):
        assert torch.equal(w, wanted)


# The interpreter cuts bfloat16 off instead of rounding it.
DTYPES = [torch.float16, torch.float32, *([torch.bfloat16] if DEVICE == "cuda" else [])]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 2.0**125, 2.0**-130], ids=["plain", "huge", "subnormal"])
def test_messages_by_table_equal_those_by_tensor(dtype: torch.dtype, scale: float) -> None:
    gradients, momenta, weights = _tensors()
    for tensor in (*momenta, gradients[0]):
        tensor *= scale / 8
    table = _table(gradients, momenta, weights, None)
    kept = table.update_momentum_(mu=MU, nesterov=False, keep="largest")
    message = table.message(kept, slice(1, 5), dtype, mu=MU, nesterov=False)
    slabs = [_upper(momenta)[0][1:], momenta[1]]
    assert torch.equal(message, pack(slabs, 4, SHAPE, dtype))


@pytest.mark.parametrize("is_finite", [True, False])
@pytest.mark.parametrize("split_gate_up", [False, True])
def test_a_step_by_table_equals_one_by_tensor(
    split_gate_up: bool, is_finite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    shapes = {"mlp.experts.gate_up_proj": (5, 16, 12), "a": (8, 12), "b": (8, 12), "c": (12, 8)}
    first = [torch.randn(shape, device=DEVICE) for shape in shapes.values()]
    gradients = [torch.randn_like(w) for w in first]
    found = []
    for is_by_table in (True, False):
        if not is_by_table:
            monkeypatch.setattr(matrix_table, "find_kernels", lambda _: None)
        weights = [torch.nn.Parameter(w.clone()) for w in first]
        options = MuonOptions(ns_dtype="float32", max_stack_gib=4e-6, split_gate_up=split_gate_up)
        optimizer = Muon(zip(shapes, weights, strict=True), lr=0.5, options=options)
        assert len(optimizer.plan.slots) > 3
        reset_launch_counts()
        for _ in range(2):
            for weight, gradient in zip(weights[:3], gradients, strict=False):
                weight.grad = gradient.clone()
            optimizer.step(finite=torch.tensor(is_finite, device=DEVICE))
        assert ("triton.update" in launch_counts()) == is_by_table
        momenta = [optimizer.state[weight]["momentum"] for weight in weights]
        found.append((weights, momenta))
    (weights, momenta), (expected, expected_momenta) = found
    for m, wanted in zip(momenta, expected_momenta, strict=True):
        assert torch.equal(m, wanted)
    for w, wanted in zip(weights, expected, strict=True):
        # Norms are summed in another order.
        torch.testing.assert_close(w, wanted, rtol=1e-5, atol=1e-5)
