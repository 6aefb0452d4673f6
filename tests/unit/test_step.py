from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.support.host_reads import HostReads
from tests.support.meshes import one_rank_mesh
from tests.support.networks import VOCAB_SIZE, moe_architecture, random_model
from trainer.clock import Clock
from trainer.config.optim import SGDConfig
from trainer.data import Document, Pack, micro_batches
from trainer.data.packing import Sample
from trainer.model import setup_model
from trainer.optim import setup_optimizer
from trainer.progress import Progress
from trainer.step import StepRecord, StepSettings, StepTotals, TrainStep

SEQ_LEN = 16
CPU = torch.device("cpu")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with one_rank_mesh() as mesh:
        yield mesh


def document(num_tokens: int, weight: float = 1.0, source: int = 0) -> Document:
    ids = np.arange(num_tokens) % VOCAB_SIZE
    return Document.from_sample(Sample(ids, np.full(num_tokens, weight, np.float32)), source)


def train_step(mesh: DeviceMesh, **settings: object) -> TrainStep:
    model = setup_model(random_model(moe_architecture()), mesh)
    optimizer = setup_optimizer(SGDConfig(lr=0.5), model.named_parameters(), mesh)
    defaults = StepSettings(load_balancing_coef=0.0, max_norm=None, max_skipped_steps=2)
    return TrainStep(model, optimizer, lambda n: 1.0, replace(defaults, **settings), Progress())


def run(step: TrainStep, packs: list[Pack]) -> StepRecord:
    clock = Clock(CPU)
    clock.mark("start")
    shape = dict(rank=0, world_size=1, micro_batch_size=1, seq_len=SEQ_LEN, pad_id=0)
    return step(clock, micro_batches(packs, **shape), StepTotals.of(packs))


def test_totals_count_tokens_and_never_padding():
    packs = [Pack((document(5, 2.0), document(3, source=1))), Pack((document(4),)), Pack()]
    totals = StepTotals.of(packs)
    assert (totals.num_tokens, totals.trained_tokens) == (12, 4 + 2 + 3)
    assert totals.num_pairs == 15 + 6 + 10
    assert totals.source_weights == {0: 8.0 + 3.0, 1: 2.0}
    assert totals.weight == 13.0


def test_a_step_reads_nothing_back_but_whether_the_last_one_counted(mesh):
    step = train_step(mesh, max_norm=1.0, load_balancing_coef=0.1, num_sources=2)
    packs = [Pack((document(5, source=1), document(3))), Pack((document(4),)), Pack()]
    with HostReads() as first:
        run(step, packs)
    assert first.names == []
    with HostReads() as second:
        run(step, packs)
    assert second.names == ["aten._local_scalar_dense.default"]


def test_steps_that_are_not_finite_change_nothing_and_too_many_in_a_row_end_the_run(mesh):
    step = train_step(mesh)
    good, bad = [Pack((document(9),))], [Pack((document(9, np.inf),))]
    before = [p.full_tensor().clone() for p in step.model.parameters()]
    run(step, bad)
    step.settle()
    after = [p.full_tensor() for p in step.model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert (step.progress.step, step.progress.num_applied, step.progress.num_skipped) == (1, 0, 1)
    run(step, good)
    run(step, bad)
    run(step, bad)
    with pytest.raises(RuntimeError, match=r"2 steps in a row .*optim\.max_skipped_steps=2"):
        step.settle()
    assert (step.progress.step, step.progress.num_applied, step.progress.num_skipped) == (4, 1, 3)


def test_the_load_balancing_loss_trains_by_its_coefficient_and_is_shown_apart(mesh):
    without, added = (
        run(train_step(mesh, load_balancing_coef=coefficient), [Pack((document(9),))]).values.read()
        for coefficient in (0.0, 1.0)
    )
    assert added[0] != without[0], "the gradient norm"
    assert torch.equal(added[1:], without[1:]), "routing and both losses, before the step"
    assert added[3] > 0


def test_micro_batches_add_up(mesh):
    packs = [Pack((document(9),)), Pack((document(4, 2.0), document(7)))]
    whole = run(train_step(mesh), packs).values.read()
    step = train_step(mesh)
    clock = Clock(CPU)
    clock.mark("start")
    shape = dict(rank=0, world_size=1, micro_batch_size=2, seq_len=SEQ_LEN, pad_id=0)
    at_once = step(clock, micro_batches(packs, **shape), StepTotals.of(packs)).values.read()
    # fp32 sums in another order.
    torch.testing.assert_close(whole, at_once, rtol=1e-5, atol=1e-7)


def test_units_on_one_rank_reduce_their_gradients_once_a_step(mesh, monkeypatch):
    reductions = []
    accumulate = TrainStep._accumulate_gradients

    def spied(step, losses):
        def after(loss):
            # What earlier micro-batches left where the optimizer looks.
            reductions.append(sum(p.grad is not None for p in step.model.parameters()))
            return loss()

        found = accumulate(step, [lambda loss=loss: after(loss) for loss in losses])
        assert all(p.grad is not None for p in step.model.parameters())
        return found

    monkeypatch.setattr(TrainStep, "_accumulate_gradients", spied)
    run(train_step(mesh), [Pack((document(9),)), Pack((document(7),)), Pack((document(5),))])
    assert reductions == [0, 0, 0]
