"""Reinforcement learning, from a config to saved weights: sample, step, log, evaluate, save.

Owns the order, and where a run stands: the place in the prompts, the round, and the rollouts in
flight. Read next: `collect.py` (rollouts), `policy.py` (the step).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from transformers import PreTrainedTokenizerFast

from trainer.clock import Clock
from trainer.config import RLConfig
from trainer.data import setup_tokenizer
from trainer.errors import Interrupted, UserError
from trainer.loops.assembly import open_run
from trainer.loops.due import is_due
from trainer.loops.rl.collect import Collector, RolloutBatch
from trainer.loops.rl.plot import plot_metrics
from trainer.loops.rl.policy import Policy
from trainer.loops.rl.prompts import Prompt, Prompts, PromptStream, setup_prompts, tokenization
from trainer.loops.run import Run
from trainer.model.inference import inference
from trainer.parallel.agreement import Ranks
from trainer.parallel.world import open_world
from trainer.rl.engine import Sampling
from trainer.rl.local import LocalEngine
from trainer.rl.rollouts import Rollout, cut_rollouts_after, in_groups, write_rollouts

SAMPLES_A_RUN = 20
"""How often a sample is shown to the person watching."""
NUM_SHOWN_AT_EVALUATION = 3
SAMPLING_TIMES = ("time/rollout", "rollout/tokens_per_second")
"""Metrics of the step that sampled, and not of further steps on the same batch."""


def run_rl(config: RLConfig) -> None:
    """Run `trainer rl`.

    Raises:
        UserError: the config, the data, a reward or the folder does not allow the run.
        Interrupted: a signal asked for an end; the state is saved.

    Collective: every rank of the launch calls it.
    """
    with open_world(config.parallel) as world:
        tokenizer, prompts, sampling = Ranks().together(lambda: _setup_data(config))
        with open_run(config, world, tokenizer, "RL") as (run, position):
            run.say(prompts.description)
            engine = LocalEngine(
                run.model,
                inference,
                run.device,
                pad_id=run.pad_id,
                batch_size=config.rollout.batch_size,
            )
            collector = Collector(config, tokenizer, engine, sampling)
            rounds = Rounds(run, config, prompts.train, collector)
            if position is not None:
                rounds.load_state_dict(position)
            train(run, config, prompts, rounds)
            if run.world.is_first:
                plot_metrics(run.folder / "metrics.jsonl", run.folder / "rewards.png")
            run.say("\n".join([*run.where_things_lie(), *_further_files(run)]))


def _setup_data(config: RLConfig) -> tuple[PreTrainedTokenizerFast, Prompts, Sampling]:
    tokenizer = setup_tokenizer(tokenization(config), config.model.name)
    prompts = setup_prompts(config, tokenizer)
    return tokenizer, prompts, Sampling.from_config(config.rollout, stop_ids(config, tokenizer))


def stop_ids(config: RLConfig, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the tokens that end a completion: the tokenizer's end of text first.

    Raises:
        UserError: a stop token is none of the tokenizer's.
    """
    vocabulary = tokenizer.get_vocab()
    for token in config.rollout.stop_tokens:
        if token not in vocabulary:
            raise UserError(
                f"rollout.stop_tokens={list(config.rollout.stop_tokens)!r}: {token!r} is no single "
                "token of the tokenizer; give tokens of its vocabulary"
            )
    assert isinstance(tokenizer.eos_token_id, int), "the encoder refuses tokenizers without one"
    return [tokenizer.eos_token_id, *(vocabulary[token] for token in config.rollout.stop_tokens)]


@dataclass
class InFlight:
    """A rollout batch whose groups are trained on part by part.

    Attributes:
        batch: With advantages.
        num_updates_done: Parts that have been trained on.
    """

    batch: RolloutBatch
    num_updates_done: int = 0


class Rounds:
    """Deals out the rollouts of each optimizer step, sampling anew when the last are used up.

    Args:
        run: Under way.
        config: Of the run.
        stream: Of training prompts.
        collector: Samples and scores.
    """

    def __init__(
        self, run: Run, config: RLConfig, stream: PromptStream, collector: Collector
    ) -> None:
        self.collector = collector
        self.policy = Policy(run, config)
        self._run = run
        self._config = config
        self._stream = stream
        self._round = 0
        self._in_flight: InFlight | None = None

    def next_rollouts(self) -> tuple[list[Rollout], dict[str, float]]:
        """Return the rollouts of the next optimizer step, and the metrics of their batch.

        Every step has the metrics of the batch it trains on; what sampling took is the first's.

        Collective: as `Collector.collect` when a batch is due; rank 0 writes it to its file.
        """
        if self._in_flight is None:
            self._in_flight = InFlight(self._sample())
        flight, num_updates = self._in_flight, self._config.rollout.num_updates
        size = len(flight.batch.groups) // num_updates
        start = flight.num_updates_done * size
        part = flight.batch.groups[start : start + size]
        flight.num_updates_done += 1
        if flight.num_updates_done == num_updates:
            self._in_flight = None
        rollouts = [rollout for group in part for rollout in group]
        # A skipped step counts as any other: nothing waits for its outcome.
        staleness = self._run.progress.step - rollouts[0].version
        metrics = flight.batch.metrics | {"rollout/off_policy_steps": staleness}
        is_first = start == 0
        return rollouts, {n: v for n, v in metrics.items() if is_first or n not in SAMPLING_TIMES}

    def state_dict(self) -> dict[str, Any]:
        """Return where the run stands, as JSON: rollouts in flight included."""
        flight = self._in_flight
        return {
            "prompts": self._stream.state_dict(),
            "round": self._round,
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
        """Continue from where a run stood; rollout files of later steps are removed.

        Raises:
            UserError: rollouts are in flight that the config would have sampled otherwise.

        Collective: one broadcast.
        """
        self._stream.load_state_dict(state["prompts"])
        self._round = state["round"]
        if state["in_flight"] is not None:
            self._in_flight = self._restore(state["in_flight"])
        folder, step = self._run.folder / "rollouts", self._run.progress.step
        Ranks().on_first(lambda: cut_rollouts_after(folder, step), OSError)

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

    def _sample(self) -> RolloutBatch:
        self._round += 1
        version = self._run.progress.step
        batch = self.collector.collect(self._stream, self._round, version)
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


def train(run: Run, config: RLConfig, prompts: Prompts, rounds: Rounds) -> None:
    """Train from where the run stands to `max_steps`.

    Raises:
        Interrupted: a signal asked for an end; the state is saved.
        RuntimeError: the run has diverged.

    Collective: every rank samples, steps, evaluates and saves together.
    """
    at_start: dict[str, float] = {}
    if run.progress.step == 0 and config.val.at_start and prompts.held_out:
        measured = evaluate(run, rounds.collector, prompts.held_out, "before training")
        at_start = {f"{name}_at_start": value for name, value in measured.items()}
    while run.progress.step < config.max_steps:
        clock = Clock(run.device)
        clock.mark("start")
        with run.profiler.step(run.progress.step + 1):
            rollouts, rollout_metrics = rounds.next_rollouts()
            record, policy_metrics = rounds.policy.step(clock, rollouts)
        run.log(record, rollout_metrics | policy_metrics | at_start)
        at_start = {}
        if record.step % max(1, config.max_steps // SAMPLES_A_RUN) == 0:
            run.say(sample_text(rollouts[0]))
        if prompts.held_out and is_due(config.val.interval, record.step, config.max_steps):
            run.log_more(evaluate(run, rounds.collector, prompts.held_out, f"at {record.step}"))
        stopped_by = run.stop_signal.agreed()
        run.save_if_due(rounds.state_dict(), now=stopped_by is not None)
        if stopped_by is not None:
            raise Interrupted(stopped_by)


def evaluate(
    run: Run, collector: Collector, held_out: Sequence[Prompt], moment: str
) -> dict[str, float]:
    """Answer the held-out prompts greedily; return the pass rate and the mean scores.

    Collective: as `Collector.evaluate`.
    """
    began = time.perf_counter()
    answers = collector.evaluate(held_out, run.progress.step)
    pass_rate = fmean(rollout.is_pass for rollout in answers)
    metrics = {
        "val/pass_rate": pass_rate,
        "val/reward": fmean(rollout.reward for rollout in answers),
        "time/evaluate": time.perf_counter() - began,
    }
    for name in answers[0].scores:
        metrics[f"val/reward/{name}"] = fmean(rollout.scores[name] for rollout in answers)
    run.say(f"held-out pass rate {moment}: {pass_rate:.3f} of {len(answers)} prompts, greedy")
    if run.progress.step in (0, run.config.max_steps):
        run.say("\n".join(sample_text(rollout) for rollout in answers[:NUM_SHOWN_AT_EVALUATION]))
    return metrics


def sample_text(rollout: Rollout) -> str:
    """Return a sample for people: the end of its question, the completion, what it earned."""
    return (
        f"  {rollout.question[-60:]!r} -> {rollout.completion[:80]!r} "
        f"(reference {rollout.reference[:40]!r}, reward {rollout.reward:.3f})"
    )


def _further_files(run: Run) -> list[str]:
    """Return lines about what only RL leaves behind."""
    return [
        f"  plot        {run.folder / 'rewards.png'}",
        f"  rollouts    {run.folder / 'rollouts'}",
    ]
