"""The passes by table equal those tensor by tensor, bit for bit, in Triton's interpreter."""

import pytest
import torch

from trainer.optim.passes import apply_updates_, directions, update_momentum_
from trainer.optim.wire import pack

pytest.importorskip("triton")

from trainer.optim.kernels import matrix_table
from trainer.optim.kernels.matrix_table import MatrixTable

SHAPE = (40, 260)
"""Two and a half tiles a matrix."""
MU = 0.9


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.optim.kernels import passes_triton

    if not torch.cuda.is_available():
        if type(passes_triton._update_kernel).__name__ != "InterpretedFunction":
            pytest.skip("needs a GPU or TRITON_INTERPRET=1")
        monkeypatch.setattr(matrix_table, "_find_kernels", lambda _: passes_triton)


def _tensors(device: str):
    torch.manual_seed(0)
    whole = torch.randn(3, 2 * SHAPE[0], SHAPE[1], device=device)
    momenta = [whole[:, : SHAPE[0]], torch.randn(2, *SHAPE, device=device)]
    gradients = [torch.randn(3, *SHAPE, device=device), None]
    gradients[0][1] *= 1e-30
    momenta[0][1] *= 1e-30
    momenta[0][2], gradients[0][2] = 0.0, 0.0
    weights = [torch.randn(len(m), *SHAPE, device=device) for m in momenta]
    return gradients, momenta, weights


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("is_open", [None, True, False])
def test_passes_by_table_equal_those_by_tensor(nesterov: bool, is_open: bool | None) -> None:
    gate = None if is_open is None else torch.tensor(is_open, device=DEVICE)
    gradients, momenta, weights = _tensors(DEVICE)
    expected = [m.clone() for m in momenta], [w.clone() for w in weights]
    if is_open is False:
        gradients[0][0, 0, 0] = float("nan")
    update_momentum_(expected[0], gradients, [gate, gate], MU)
    table = MatrixTable.of(gradients, momenta, weights, [gate, gate])
    assert table is not None
    kept = table.update_momentum_(mu=MU, nesterov=nesterov, keep="squares")
    for m, wanted in zip(momenta, expected[0], strict=True):
        assert torch.equal(m, wanted)
    if is_open is not False:
        u = torch.cat(list(directions(expected[0], gradients, MU, nesterov=nesterov))).double()
        norm = torch.linalg.vector_norm(u, dim=(1, 2), keepdim=True)
        stack = table.normalized_stack(
            kept, slice(0, 5), SHAPE, torch.float32, mu=MU, nesterov=nesterov
        )
        torch.testing.assert_close(stack.double(), u / norm.where(norm > 0, 1.0))
        assert not stack[2].any()
    update = torch.randn(5, *SHAPE, device=DEVICE).bfloat16()
    settings = {"step_size": 0.25, "decay": 0.125}
    apply_updates_(expected[1], update.split([3, 2]), [gate, gate], cautious=False, **settings)
    table.apply_(update, slice(0, 5), **settings)
    for w, wanted in zip(weights, expected[1], strict=True):
        assert torch.equal(w, wanted)


# The interpreter cuts bfloat16 off instead of rounding it.
DTYPES = [torch.float16, torch.float32, *([torch.bfloat16] if DEVICE == "cuda" else [])]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_messages_by_table_equal_those_by_tensor(dtype: torch.dtype) -> None:
    gradients, momenta, weights = _tensors(DEVICE)
    table = MatrixTable.of(gradients, momenta, weights, [None, None])
    assert table is not None
    kept = table.update_momentum_(mu=MU, nesterov=False, keep="largest")
    message = table.message(kept, slice(1, 5), dtype, mu=MU, nesterov=False)
    slabs = [momenta[0][1:], momenta[1]]
    assert torch.equal(message, pack(slabs, 4, SHAPE, dtype))
