"""One training step: forward and backward over micro-batches, clip, optimizer, record.

Owns the order of a step, the host side of the non-finite gate and the step's record. Does not own
data order (`trainer.data`), the update (`trainer.optim`) or where records go (`trainer.metrics`).
Nothing here waits for the device: a step's values are copied aside and read one step later.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from trainer.clock import Clock, HostCopy
from trainer.data import Pack, PackedBatch
from trainer.losses import sft_loss
from trainer.model.causal_lm import CausalLM
from trainer.model.load_balancing import max_violation
from trainer.optim.interface import TrainerOptimizer
from trainer.parallel.clip import clip_gradients_
from trainer.parallel.fsdp import units_alone
from trainer.parallel.watchdog import set_phase
from trainer.progress import Progress


class Diverged(RuntimeError):  # noqa: N818 - what happened to the run
    """Too many steps in a row had a non-finite loss or gradient."""


@dataclass(frozen=True)
class StepSettings:
    """What a step needs of the config, fixed for the run."""

    load_balancing_coef: float
    max_norm: float | None
    max_skipped_steps: int
    num_sources: int = 0
    """Sources of data whose losses are measured apart."""


@dataclass(frozen=True)
class StepTotals:
    """Counts of one step over all ranks and micro-batches; every rank knows all packs.

    Attributes:
        weight: Sum of the loss weights, the loss's denominator.
        num_tokens: Tokens, padding excluded.
        trained_tokens: Tokens with a loss.
        num_pairs: Causal (query, key) pairs inside documents, for the FLOPs of attention.
        source_weights: Of `weight`, what each source of data has, by its index.
    """

    weight: float
    num_tokens: int
    trained_tokens: int
    num_pairs: int
    source_weights: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, packs: Sequence[Pack]) -> "StepTotals":
        """Count the packs of one global step."""
        documents = [document for pack in packs for document in pack.documents]
        source_weights: dict[int, float] = {}
        for document in documents:
            weight = source_weights.get(document.source, 0.0) + float(document.weights.sum())
            source_weights[document.source] = weight
        return cls(
            weight=sum(source_weights.values()),
            num_tokens=sum(len(document) for document in documents),
            trained_tokens=sum(pack.num_trained for pack in packs),
            num_pairs=sum(len(document) * (len(document) + 1) // 2 for document in documents),
            source_weights=source_weights,
        )


@dataclass(frozen=True)
class MicroLoss:
    """One micro-batch's share of a step's loss.

    Attributes:
        total: 0-d, to call `backward()` on.
        sums: fp64 1-d, what adds up over micro-batches and ranks: the loss, the load-balancing
            loss, then what a loss measures besides.
        expert_counts_LE: int64, of this forward.
    """

    total: Tensor
    sums: Tensor
    expert_counts_LE: Tensor


@dataclass(frozen=True)
class StepRecord:
    """What one step measured; values still on their way from the device.

    Attributes:
        step: The step, from 1.
        lr: Learning rate of the first param group.
        totals: The step's counts.
        num_tokens: Tokens of the run so far, this step included, padding excluded.
        trained_tokens: Of those, the ones with a loss.
        values: fp64, global: gradient norm, mean max violation, loss, load-balancing loss, then
            what the loss measured besides.
        phase_times: Reads the optimizer's phases in ms, by metric name.
        clock: Marks `start`, `forward`, `backward`, `optimizer`, each when that phase begins or,
            the last two, ends.
    """

    step: int
    lr: float
    totals: StepTotals
    num_tokens: int
    trained_tokens: int
    values: HostCopy
    phase_times: Callable[[], dict[str, float]]
    clock: Clock


class TrainStep:
    """Runs optimizer steps on a model, one a call.

    Args:
        model: From `setup_model`.
        optimizer: From `setup_optimizer`.
        factor: Learning-rate factor by number of applied steps (`build_schedule`).
        settings: The step's part of the config.
        progress: Counters of the run, advanced here.
    """

    def __init__(
        self,
        model: CausalLM,
        optimizer: TrainerOptimizer,
        factor: Callable[[int], float],
        settings: StepSettings,
        progress: Progress,
    ) -> None:
        assert isinstance(model, FSDPModule), "setup_model shards the model"
        self.model = model
        self._shards: FSDPModule = model
        self._units_alone = units_alone(model)
        self.optimizer = optimizer
        self.factor = factor
        self.settings = settings
        self.progress = progress
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]

    def __call__(
        self, clock: Clock, micro_batches: Sequence[PackedBatch], totals: StepTotals
    ) -> StepRecord:
        """Train on this rank's micro-batches of one global step.

        Args:
            clock: Marked `start` when the step began (fetching data belongs to it).
            micro_batches: This rank's part, on the device; as many on every rank.
            totals: Counts over all ranks and micro-batches.

        Raises:
            Diverged: too many steps in a row were not finite.

        Collective: forward and backward as FSDP and expert dispatch do; one all-reduce of the
            step's sums; the gradient norm's; the optimizer's exchange. All ranks call.
        """
        device = micro_batches[0].input_ids_PS.device
        # A fill; a tensor of a number would be copied there, and the host would wait for it.
        total_weight = torch.full((), totals.weight, dtype=torch.float32, device=device)
        losses = [partial(self._supervised_loss, batch, total_weight) for batch in micro_batches]
        return self.train_on(clock, losses, totals)

    def train_on(
        self, clock: Clock, losses: Sequence[Callable[[], MicroLoss]], totals: StepTotals
    ) -> StepRecord:
        """Train on any loss: one optimizer step on the sum of micro-batches' shares.

        Args:
            clock: As in a call.
            losses: Each runs the forward of one micro-batch; not empty, as many on every rank.
            totals: Counts over all ranks and micro-batches.

        Raises:
            Diverged: too many steps in a row were not finite.

        Collective: as a call.
        """
        clock.mark("forward")
        set_phase("forward and backward")
        sums, max_vio = self._accumulate_gradients(losses)
        clock.mark("backward")
        gradient = clip_gradients_(self.model.parameters(), self.settings.max_norm)
        finite = gradient.finite & sums[:2].isfinite().all()
        set_phase("optimizer")
        self.settle()
        lr = self._set_learning_rates()
        self.optimizer.step(finite=finite)
        self.optimizer.zero_grad()
        clock.mark("optimizer")
        self.progress.advance(totals.num_tokens, totals.trained_tokens)
        values = torch.cat([gradient.norm.double().view(1), max_vio.view(1), sums])
        return StepRecord(
            step=self.progress.step,
            lr=lr,
            totals=totals,
            num_tokens=self.progress.num_tokens,
            trained_tokens=self.progress.trained_tokens,
            values=HostCopy(values),
            phase_times=self.optimizer.phase_times(),
            clock=clock,
        )

    def settle(self) -> None:
        """Take in whether the last step was applied, by now known without waiting.

        Raises:
            Diverged: too many steps in a row were not finite.
        """
        if self.progress.step == self.progress.num_settled:
            return
        self.progress.settle(applied=self.optimizer.settle())
        if self.progress.skipped_in_row >= self.settings.max_skipped_steps:
            raise Diverged(
                f"{self.progress.skipped_in_row} steps in a row had a non-finite loss or gradient "
                f"(up to step {self.progress.step}; optim.max_skipped_steps="
                f"{self.settings.max_skipped_steps}): the run has diverged; lower optim.lr or look "
                "at the data of these steps"
            )

    def _accumulate_gradients(
        self, losses: Sequence[Callable[[], MicroLoss]]
    ) -> tuple[Tensor, Tensor]:
        """Run forward and backward; return the sums and the mean max violation, fp64, global.

        Collective: one all-reduce (sum) over the world after the last backward.
        """
        shares: list[MicroLoss] = []
        for index, loss in enumerate(losses):
            is_last = index == len(losses) - 1
            self._shards.set_is_last_backward(is_last)
            self._shards.set_requires_all_reduce(is_last)
            for unit in self._units_alone:
                unit.set_requires_gradient_sync(is_last, recurse=False)
            share = loss()
            share.total.backward()
            shares.append(replace(share, total=share.total.detach()))
        sums = torch.stack([share.sums for share in shares]).sum(0)
        counts_LE = torch.stack([share.expert_counts_LE.double() for share in shares]).sum(0)
        summed = torch.cat([sums, counts_LE.flatten()])
        dist.all_reduce(summed)
        max_vio_L = max_violation(summed[len(sums) :].view_as(counts_LE))
        return summed[: len(sums)], max_vio_L.mean() if len(max_vio_L) else summed.new_zeros(())

    def _supervised_loss(self, batch: PackedBatch, total_weight: Tensor) -> MicroLoss:
        outputs = self.model(
            batch.input_ids_PS,
            position_ids=batch.position_ids_PS,
            target_ids=batch.target_ids_PS,
            target_rows=batch.target_rows_N,
            token_mask=batch.token_mask_PS,
        )
        terms = sft_loss(
            outputs,
            batch.weights_PS,
            total_weight=total_weight,
            load_balancing_coef=self.settings.load_balancing_coef,
        )
        sums = torch.stack([terms.cross_entropy, terms.load_balancing]).double()
        sums = torch.cat([sums, self._source_losses(batch, outputs.log_probs_PS)])
        return MicroLoss(terms.total, sums, outputs.expert_counts_LE)

    def _source_losses(self, batch: PackedBatch, log_probs_PS: Tensor) -> Tensor:
        """Return each source's summed loss, fp64, not divided by anything."""
        num_sources = self.settings.num_sources
        sums = log_probs_PS.new_zeros(num_sources, dtype=torch.float64)
        if num_sources:
            losses_PS = -(batch.weights_PS * log_probs_PS.detach()).double()
            sums.index_add_(0, batch.sources_PS.flatten(), losses_PS.flatten())
        return sums

    def _set_learning_rates(self) -> float:
        factor = self.factor(self.progress.num_applied)
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * factor
        return self.optimizer.param_groups[0]["lr"]
