import torch

from trainer.optim.gate import FiniteGate


def test_a_step_without_a_flag_counts_as_applied() -> None:
    gate = FiniteGate()
    assert gate.settle()
    gate.record(None)
    assert not gate.is_pending
    assert gate.settle()


def test_the_flag_is_read_once_and_remembered() -> None:
    gate, flag = FiniteGate(), torch.tensor(False)
    gate.record(flag)
    flag.fill_(True)  # the caller's tensor may be reused at once
    assert gate.is_pending
    assert [gate.settle(), gate.settle()] == [False, False]
    gate.record(torch.tensor(True))
    assert gate.settle()
