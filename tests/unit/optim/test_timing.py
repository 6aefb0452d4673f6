import time

import torch

from trainer.optim.timing import PHASES, PhaseTimer


def test_times_belong_to_their_step() -> None:
    timer = PhaseTimer(torch.device("cpu"))
    assert timer.timings() == {}
    with timer.measure("momentum"):
        time.sleep(0.01)
    with timer.measure("momentum"):
        time.sleep(0.01)
    timer.end_step()
    first = timer.last_step
    timer.end_step()
    assert first.read()["optim/momentum_ms"] >= 20
    assert timer.last_step.read() == {f"optim/{phase}_ms": 0.0 for phase in PHASES}
    assert timer.timings() == timer.last_step.read()
