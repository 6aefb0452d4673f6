"""Validation loss: the mean over trained tokens of packs that are never trained on."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from trainer.config.data import BatchConfig
from trainer.data import Pack
from trainer.loops.run import Run
from trainer.model.inference import inference
from trainer.step import StepTotals


def mean_loss(run: Run, packs: Sequence[Pack], data: BatchConfig) -> float:
    """Return the weighted mean cross-entropy in nats over all packs.

    Raises:
        Interrupted: a signal asked for an end.

    Collective: forward passes as in training, equally many on every rank, each after
        `Run.stop_if_asked`; one all-reduce.
    """
    total = torch.zeros((), dtype=torch.float64, device=run.device)
    with inference(run.model):
        for batch in run.micro_batches(packs, data):
            run.stop_if_asked()
            outputs = run.model(
                batch.input_ids_PS,
                position_ids=batch.position_ids_PS,
                target_ids=batch.target_ids_PS,
                target_rows=batch.target_rows_N,
            )
            total -= (batch.weights_PS.double() * outputs.log_probs_PS.double()).sum()
    dist.all_reduce(total)
    return total.item() / max(StepTotals.of(packs).weight, 1e-300)
