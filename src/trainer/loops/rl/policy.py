"""One optimizer step on rollouts: forward, policy loss, and what it measured.

Owns the use of the policy loss on packed rollouts, and the trainer's log-probabilities before the
first update; those of the model that the run starts from are `reference.py`'s. The step itself is
`trainer.step`'s, the formulas `trainer.losses.rl`'s.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.clock import Clock
from trainer.config import RLConfig
from trainer.loops.rl.batches import (
    PolicyBatch,
    pack_rollouts,
    policy_batches,
    policy_packs,
    predicting,
    trained_rollouts,
)
from trainer.loops.rl.reference import Reference, token_log_probs
from trainer.loops.run import Run
from trainer.losses import perplexity
from trainer.losses.rl import SUMS, PolicyTokens, policy_loss
from trainer.model.inference import inference
from trainer.parallel.agreement import Ranks
from trainer.parallel.watchdog import set_phase
from trainer.rl.rollouts import Rollout
from trainer.step import MicroLoss, StepRecord, StepTotals


class Policy:
    """Trains the run's model on rollouts.

    Args:
        run: Under way.
        config: Of the run.
        reference: Built.
    """

    def __init__(self, run: Run, config: RLConfig, reference: Reference) -> None:
        self._run = run
        self._config = config
        self._reference = reference

    def step(
        self, clock: Clock, rollouts: Sequence[Rollout]
    ) -> tuple[StepRecord, dict[str, float]]:
        """Run one optimizer step; return its record and the policy's metrics by name.

        Args:
            clock: Marked `start`.
            rollouts: All of the step, the same on every rank.

        Collective: as `TrainStep.train_on`; one more all-reduce (maximum). Waits for the device.
        """
        kept = trained_rollouts(rollouts, self._config)
        packs = pack_rollouts(kept, self._config.data.seq_len)
        totals = StepTotals.of(policy_packs(packs, self._config))
        run = self._run
        weight = torch.full((), totals.weight, dtype=torch.float32, device=run.device)
        ranges: list[Tensor] = []
        losses = [
            partial(self._share, batch, weight, ranges)
            for batch in policy_batches(packs, self._config, run.world, run.pad_id)
        ]
        record = run.step.train_on(clock, losses, totals)
        extremes = torch.stack(ranges).amax(0)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        measured = record.values.read()[-len(SUMS) :].tolist()
        return record, _policy_metrics(measured, extremes.tolist(), self._config)

    def recompute(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the rollouts with the trainer's log-probabilities of their tokens.

        Collective: forward passes as in training, equally many on every rank; one all-gather.
        """
        set_phase("log-probs")
        run, config = self._run, self._config
        numbers = {id(rollout): number for number, rollout in enumerate(rollouts)}
        packs = pack_rollouts(rollouts, config.data.seq_len)
        found: dict[int, tuple[float, ...]] = {}
        for batch in policy_batches(packs, config, run.world, run.pad_id):
            with inference(run.model):
                rows = token_log_probs(run.model, batch, config.rollout.temperature).tolist()
            for row, pack in zip(rows, batch.packs, strict=False):
                for rollout, where in zip(pack, predicting(pack), strict=True):
                    found[numbers[id(rollout)]] = tuple(row[where])
        merged = {number: row for part in Ranks().gather(found) for number, row in part.items()}
        return [replace(r, old_log_probs=merged[number]) for number, r in enumerate(rollouts)]

    def _share(self, batch: PolicyBatch, weight: Tensor, ranges: list[Tensor]) -> MicroLoss:
        """Run the forward of a micro-batch; its range of ratios goes into `ranges`."""
        packed = batch.packed
        reference_log_probs = self._reference.log_probs(batch)
        outputs = self._run.model(
            packed.input_ids_PS,
            position_ids=packed.position_ids_PS,
            target_ids=packed.target_ids_PS,
            target_rows=packed.target_rows_N,
            token_mask=packed.token_mask_PS,
            temperature=self._config.rollout.temperature,
            with_entropy=True,
        )
        is_recomputed = self._config.loss.old_log_probs == "trainer"
        now = outputs.log_probs_PS.detach()
        tokens = PolicyTokens(
            log_probs=outputs.log_probs_PS,
            entropy=outputs.entropy_PS,
            sampler_log_probs=batch.sampler_log_probs_PS,
            old_log_probs=batch.old_log_probs_PS,
            anchor_log_probs=batch.old_log_probs_PS if is_recomputed else now,
            reference_log_probs=reference_log_probs,
            advantages=batch.advantages_PS,
            weights=packed.weights_PS,
            completions=batch.completions_PS,
        )
        terms = policy_loss(tokens, self._config.loss, weight)
        ranges.append(terms.ratio_range)
        share_P = packed.weights_PS.sum(1) / weight.clamp_min(1e-30)
        load_balancing = (share_P * outputs.load_balancing_P).sum()
        total = terms.loss + self._config.model.load_balancing_coef * load_balancing
        leading = torch.stack([terms.loss.detach(), load_balancing.detach()]).double()
        return MicroLoss(total, torch.cat([leading, terms.sums]), outputs.expert_counts_LE)


def _policy_metrics(
    measured: Sequence[float], extremes: Sequence[float], config: RLConfig
) -> dict[str, float]:
    num_tokens, *sums = measured
    means = {name: total / max(num_tokens, 1) for name, total in zip(SUMS[1:], sums, strict=True)}
    smallest, largest = -extremes[0], extremes[1]
    if not num_tokens:  # all were truncated and masked: no ratio differs from 1
        means["ratio"] = means["importance"] = smallest = largest = 1.0
    metrics = {
        "loss/perplexity": perplexity(means["nll"]),
        "entropy/mean": means["entropy"],
        "mismatch_kl/mean": means["mismatch_kl"],
        "ratio/mean": means["ratio"],
        "ratio/min": smallest,
        "ratio/max": largest,
        "ratio/sampler_mean": means["importance"],
        "ratio/masked": means["masked"],
        "clip_fraction": means["clipped"],
    }
    if config.loss.kl_coef:
        metrics["reference_kl/mean"] = means["reference_kl"]
    return metrics
