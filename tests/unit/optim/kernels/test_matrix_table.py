"""Tables of addresses: right, and made anew only when a tensor moved."""

from types import ModuleType

import pytest
import torch

from trainer.optim.kernels import matrix_table
from trainer.optim.kernels.matrix_table import Run, TableLayout

ROWS, COLS = 4, 8
SIZE = ROWS * COLS


@pytest.fixture
def tensors(monkeypatch):
    """Return gradients, momenta, weights and gates of two; the second has no gradient."""
    monkeypatch.setattr(matrix_table, "find_kernels", lambda _: ModuleType("kernels"))
    momenta = [torch.zeros(3, ROWS, COLS), torch.zeros(2, ROWS, COLS)]
    weights = [torch.zeros_like(momentum) for momentum in momenta]
    return [torch.zeros_like(momenta[0]), None], momenta, weights, [torch.tensor(True), None]


def layout() -> TableLayout:
    """Return that of the last two matrices of the first and the lower halves of the second's."""
    return TableLayout([Run(0, 1, 2, SIZE, 0, SIZE), Run(1, 0, 2, SIZE, SIZE // 2, SIZE // 2)])


def test_lines_are_the_addresses_of_matrices(tensors):
    (gradient, _), (momentum, other), (weight, other_weight), (gate, _) = tensors
    table = layout().table(*tensors)
    assert table is not None
    expected = [
        [gradient[i].data_ptr(), momentum[i].data_ptr(), weight[i].data_ptr(), gate.data_ptr()]
        for i in (1, 2)
    ] + [[0, other[i, 2:].data_ptr(), other_weight[i, 2:].data_ptr(), 0] for i in (0, 1)]
    assert table.addresses_B4.tolist() == expected


def test_a_table_is_made_anew_when_a_tensor_has_moved(tensors):
    made = layout()
    table = made.table(*tensors)
    assert made.table(*tensors) is table
    gradients, *others = tensors
    moved = [gradients[0].clone(), None]
    anew = made.table(moved, *others)
    assert anew is not table
    assert anew.addresses_B4[0, 0] == moved[0][1].data_ptr()
    assert made.table(gradients, *others).addresses_B4.tolist() == table.addresses_B4.tolist()


def test_tensors_that_kernels_cannot_read_have_no_table(tensors):
    gradients, momenta, weights, gates = tensors
    transposed = [weights[0].mT.contiguous().mT, weights[1]]
    assert layout().table(gradients, momenta, transposed, gates) is None
    offset = [torch.zeros(3 * SIZE + 1)[1:].view(3, ROWS, COLS), momenta[1]]
    assert layout().table(gradients, offset, weights, gates) is None


def test_a_shard_without_rows_has_no_table(tensors):
    _, _, _, gates = tensors
    empty = [torch.zeros(0, COLS), torch.zeros(0, COLS)]
    made = TableLayout([Run(0, 0, 1, 0, 0, 0), Run(1, 0, 1, 0, 0, 0)])
    assert made.table(empty, empty, empty, gates) is None
