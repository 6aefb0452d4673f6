import torch

from trainer.optim.fused import found_inf, in_step


def test_torchs_form_of_the_flag() -> None:
    assert found_inf(None) is None
    assert found_inf(torch.tensor(False)) == 1.0
    assert found_inf(torch.tensor(True)) == 0.0


def test_tensors_are_walked_in_step_and_changed_in_place() -> None:
    rows, columns = torch.zeros(2, 3), torch.zeros(3, 2).T
    with in_step([rows, columns]) as walked:
        assert walked[0] is rows
        for tensor in walked:
            assert tensor.is_contiguous()
            tensor += torch.arange(6.0).view(2, 3)
    assert torch.equal(columns, torch.arange(6.0).view(2, 3))
    assert torch.equal(columns, rows)
