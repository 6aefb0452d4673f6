"""Where a run stands between batches of rollouts: what was sampled and is still to be trained on.

Owns the deal of a batch's groups to optimizer steps, and the state of it that a checkpoint keeps:
the place in the prompts, the round, the rollouts in flight. `collect.py` samples, `policy.py`
steps, `run.py` calls both in turn.
"""

from dataclasses import dataclass, replace
from typing import Any

from trainer.config import RLConfig
from trainer.errors import Interrupted, UserError
from trainer.loops.rl.collect import Collector, RolloutBatch
from trainer.loops.rl.policy import Policy
from trainer.loops.rl.prompts import PromptStream
from trainer.loops.run import Run
from trainer.parallel.agreement import Ranks
from trainer.rl.rollouts import Rollout, cut_rollouts_after, in_groups, write_rollouts

SAMPLING_TIMES = ("time/rollout", "rollout/tokens_per_second")
"""Metrics of the step that sampled, and not of further steps on the same batch."""


@dataclass
class InFlight:
    """A rollout batch whose groups are trained on part by part.

    Attributes:
        batch: With advantages.
        num_updates_done: Parts that have been trained on.
    """

    batch: RolloutBatch
    num_updates_done: int = 0


class Place:
    """Where a run stands: in its prompts, in its rounds, in the rollouts in flight.

    Attributes:
        stream: Of training prompts.
        round: Batches sampled so far.
        in_flight: What is still to be trained on; None: a batch is due.
    """

    def __init__(self, config: RLConfig, stream: PromptStream) -> None:
        self.stream = stream
        self.round = 0
        self.in_flight: InFlight | None = None
        self._config = config

    def state_dict(self) -> dict[str, Any]:
        """Return the place as JSON, rollouts in flight included."""
        flight = self.in_flight
        return {
            "prompts": self.stream.state_dict(),
            "round": self.round,
            "in_flight": None
            if flight is None
            else {
                "num_updates_done": flight.num_updates_done,
                "settings": sampling_settings(self._config),
                "metrics": flight.batch.metrics,
                "rollouts": [r.state_dict() for group in flight.batch.groups for r in group],
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place.

        Raises:
            UserError: it is of other prompts, or rollouts are in flight that the config would have
                sampled otherwise.
        """
        self.stream.load_state_dict(state["prompts"])
        self.round = state["round"]
        if state["in_flight"] is not None:
            self.in_flight = self._restore(state["in_flight"])

    def _restore(self, state: dict[str, Any]) -> InFlight:
        rollouts = [Rollout.from_state(entry) for entry in state["rollouts"]]
        for field, value in sampling_settings(self._config).items():
            saved = state["settings"][field]
            if value != saved:
                raise UserError(
                    f"{field}={value!r}: the checkpoint holds {len(rollouts)} rollouts made under "
                    f"{saved!r}, some of them still to be trained on; resume with {saved!r}, or "
                    "from a step that ends a batch"
                )
        groups = tuple(in_groups(rollouts, self._config.rollout.num_samples))
        return InFlight(RolloutBatch(groups, state["metrics"]), state["num_updates_done"])


class Rounds:
    """Deals out the rollouts of each optimizer step, sampling anew when the last are used up.

    Args:
        run: Under way.
        config: Of the run.
        place: Where the run stands; moved on.
        collector: Samples and scores.
        policy: Trains.
    """

    def __init__(
        self, run: Run, config: RLConfig, place: Place, collector: Collector, policy: Policy
    ) -> None:
        self.collector = collector
        self.place = place
        self.policy = policy
        self._run = run
        self._config = config

    def next_rollouts(self) -> tuple[list[Rollout], dict[str, float]]:
        """Return the rollouts of the next optimizer step, and the metrics of their batch.

        Every step has the metrics of the batch it trains on; what sampling took is the first's.

        Collective: as `Collector.collect` when a batch is due; rank 0 writes it to its file.
        """
        if self.place.in_flight is None:
            self.place.in_flight = InFlight(self._sample())
        flight, num_updates = self.place.in_flight, self._config.rollout.num_updates
        size = len(flight.batch.groups) // num_updates
        start = flight.num_updates_done * size
        part = flight.batch.groups[start : start + size]
        flight.num_updates_done += 1
        if flight.num_updates_done == num_updates:
            self.place.in_flight = None
        rollouts = [rollout for group in part for rollout in group]
        # A skipped step counts as any other: nothing waits for its outcome.
        staleness = self._run.progress.step - rollouts[0].version
        metrics = flight.batch.metrics | {"rollout/off_policy_steps": staleness}
        is_first = start == 0
        return rollouts, {n: v for n, v in metrics.items() if is_first or n not in SAMPLING_TIMES}

    def cut_rollouts(self) -> None:
        """Remove rollout files of steps after the one that the run stands at.

        Collective: one broadcast.
        """
        folder, step = self._run.folder / "rollouts", self._run.progress.step
        Ranks().on_first(lambda: cut_rollouts_after(folder, step), OSError)

    def _sample(self) -> RolloutBatch:
        version, before = self._run.progress.step, self.place.stream.state_dict()
        try:
            batch = self.collector.collect(self.place.stream, self.place.round + 1, version)
        except (Interrupted, UserError):
            # The run that resumes samples this batch anew, and the same.
            self.place.stream.load_state_dict(before)
            raise
        self.place.round += 1
        counts = {f"data/{reason}": count for reason, count in self.place.stream.counts.items()}
        batch = replace(batch, metrics=batch.metrics | counts)
        rollouts = [rollout for group in batch.groups for rollout in group]
        if self._config.loss.old_log_probs == "trainer":
            rollouts = self.policy.recompute(rollouts)
            num_samples = self._config.rollout.num_samples
            batch = RolloutBatch(tuple(in_groups(rollouts, num_samples)), batch.metrics)
        folder = self._run.folder / "rollouts"
        Ranks().on_first(lambda: write_rollouts(rollouts, folder, version + 1), OSError)
        return batch


def sampling_settings(config: RLConfig) -> dict[str, Any]:
    """Return what rollouts in flight were made under, by field: what must not change with them."""
    rollout, loss = config.rollout, config.loss
    return {
        "rollout.num_prompts": rollout.num_prompts,
        "rollout.num_samples": rollout.num_samples,
        "rollout.num_updates": rollout.num_updates,
        "rollout.temperature": rollout.temperature,
        "rollout.truncated": rollout.truncated,
        "rollout.truncation_penalty": rollout.truncation_penalty,
        "loss.advantage": loss.advantage,
        "loss.old_log_probs": loss.old_log_probs,
    }
