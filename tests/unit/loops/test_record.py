import math

import pytest
import torch

from trainer.clock import Clock, HostCopy
from trainer.loops.record import source_losses, step_metrics
from trainer.step import StepRecord, StepTotals

CPU = torch.device("cpu")


class FixedClock(Clock):
    """A clock that was read beforehand: marks at these seconds."""

    def __init__(self, **marks: float) -> None:
        super().__init__(CPU)
        self._marks = marks


def record(values: list[float], **totals: object) -> StepRecord:
    counts = {"weight": 4.0, "num_tokens": 300, "trained_tokens": 100, "num_pairs": 5} | totals
    return StepRecord(
        step=7,
        lr=0.5,
        totals=StepTotals(**counts),
        num_tokens=2100,
        trained_tokens=700,
        values=HostCopy(torch.tensor(values, dtype=torch.float64)),
        phase_times=lambda: {"optim/exchange_ms": 1.5},
        clock=FixedClock(start=10.0, forward=10.5, backward=11.5, optimizer=12.0),
    )


def metrics(step: StepRecord, **options: object) -> dict[str, float | int | None]:
    options = dict(flops=4e12, world_size=2, device=CPU, is_moe=True) | options
    return step_metrics(step, 3, **options)


def test_every_number_has_its_name_and_unit():
    found = metrics(record([0.25, 0.125, 2.0, 2.5]))
    assert found.pop("perf/peak_memory") > 0
    assert found == {
        "loss/mean": 2.0,
        "loss/perplexity": math.exp(2.0),
        "optim/lr": 0.5,
        "optim/grad_norm": 0.25,
        "optim/skipped_steps": 3,
        "optim/exchange_ms": 1.5,
        "progress/num_tokens": 2100,
        "progress/trained_tokens": 700,
        "time/step": 2.0,
        "time/forward_backward": 1.0,
        "time/optimizer": 0.5,
        "perf/throughput": 150.0,
        "perf/mfu": None,
        "max_vio/mean": 0.125,
        "loss/load_balancing": 2.5,
    }


def test_a_dense_model_has_no_numbers_of_experts():
    assert "max_vio/mean" not in metrics(record([1.0, 0.0, 2.0, 0.0]), is_moe=False)


def test_mfu_is_the_part_of_all_ranks_peak(monkeypatch):
    monkeypatch.setattr("trainer.loops.record.peak_flops", lambda device: 2e12)
    # 4 TFLOP in 2 s on two devices of 2 TFLOP/s.
    assert metrics(record([1.0, 0.0, 2.0, 0.0]))["perf/mfu"] == 0.5


def test_each_source_that_was_trained_has_its_mean_loss():
    step = record([0.25, 0.0, 2.0, 0.0, 6.0, 0.0, 1.0], source_weights={0: 3.0, 2: 1.0})
    assert source_losses(step, ["code", "books", "web"]) == {
        "loss/code": pytest.approx(2.0),
        "loss/web": pytest.approx(1.0),
    }
