"""Reinforcement learning, from a config to saved weights: sample, step, log, evaluate, save.

Owns the order. Read next: `rounds.py` (where a run stands), `collect.py` (rollouts), `policy.py`
(the step).
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean

from transformers import PreTrainedTokenizerFast

from trainer.clock import Clock
from trainer.config import RLConfig
from trainer.config.rl import RolloutConfig
from trainer.data import setup_tokenizer
from trainer.data.host_memory import check_fits_host
from trainer.errors import UserError
from trainer.loops.assembly import RunParts, open_run
from trainer.loops.due import is_due
from trainer.loops.rl.collect import Collector
from trainer.loops.rl.judge import Judge
from trainer.loops.rl.plot import plot_metrics
from trainer.loops.rl.policy import Policy
from trainer.loops.rl.prompts import Prompt, Prompts, setup_prompts, tokenization
from trainer.loops.rl.reference import Reference
from trainer.loops.rl.rounds import Place, Rounds
from trainer.loops.run import Run
from trainer.loops.run_folder import origin_of
from trainer.metrics import RECORD
from trainer.model.inference import inference
from trainer.parallel.agreement import Ranks
from trainer.parallel.world import open_world
from trainer.rl.engine import Sampling
from trainer.rl.local import LocalEngine
from trainer.rl.rollouts import Rollout, pass_rates
from trainer.rl.scoring import Scorer

SAMPLES_A_RUN = 20
"""How often a sample is shown to the person watching."""
NUM_SHOWN_AT_EVALUATION = 3
BYTES_OF_A_ROLLOUT = 1024
"""At least: ids and log-probabilities of a few tokens, as Python numbers."""


def run_rl(config: RLConfig) -> None:
    """Run `trainer rl`.

    Raises:
        UserError: the config, the data, a reward or the folder does not allow the run.
        Interrupted: a signal asked for an end; the state is saved.

    Collective: every rank of the launch calls it.
    """
    with open_world(config.parallel) as world:
        tokenizer, prompts, sampling, scorer = Ranks().together(lambda: _setup(config))
        place, reference = Place(config, prompts.train), Reference(config, world)
        parts = RunParts(config, world, tokenizer, "RL", place, build_more=reference.build)
        with open_run(parts) as (run, is_resumed):
            run.say(prompts.description)
            engine = LocalEngine(
                run.model,
                inference,
                run.device,
                pad_id=run.pad_id,
                batch_size=config.rollout.batch_size,
            )
            collector = Collector(
                config,
                engine,
                sampling,
                Judge(config, tokenizer, scorer),
                is_asked_to_stop=lambda: run.stop_signal.received is not None,
                stop_if_asked=run.stop_if_asked,
            )
            rounds = Rounds(run, config, place, collector, Policy(run, config, reference))
            if is_resumed:
                rounds.cut_rollouts()
            train(run, config, prompts, rounds)
            if run.world.is_first:
                plot_metrics(run.folder / RECORD, run.folder / "rewards.png")
            run.say("\n".join([*run.where_things_lie(), *_further_files(run)]))


def _setup(config: RLConfig) -> tuple[PreTrainedTokenizerFast, Prompts, Sampling, Scorer]:
    """Make all that can be refused before a model is built."""
    _check_rollouts_fit(config.rollout)
    scorer = Scorer.from_config(config.env)
    tokenizer = setup_tokenizer(tokenization(config), origin_of(config))
    prompts = setup_prompts(config, tokenizer)
    sampling = Sampling.from_config(config.rollout, stop_ids(config, tokenizer))
    return tokenizer, prompts, sampling, scorer


def _check_rollouts_fit(rollout: RolloutConfig) -> None:
    samples, prompts = rollout.num_samples, rollout.num_prompts
    check_fits_host("rollout.num_samples", samples, BYTES_OF_A_ROLLOUT, "rollouts of a prompt")
    check_fits_host("rollout.num_prompts", prompts, samples * BYTES_OF_A_ROLLOUT, "rollouts")


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


def train(run: Run, config: RLConfig, prompts: Prompts, rounds: Rounds) -> None:
    """Train from where the run stands to `max_steps`.

    Raises:
        UserError: a prompt cannot be used, or a reward failed and failures end the run; the state
            is saved.
        Interrupted: a signal asked for an end; `open_run` saves the state.
        RuntimeError: the run has diverged.

    Collective: every rank samples, steps, evaluates and saves together.
    """
    at_start: dict[str, float] = {}
    if run.progress.step == 0 and config.val.at_start and prompts.held_out:
        measured = evaluate(run, rounds.collector, prompts.held_out, "before training")
        at_start = {f"{name}_at_start": value for name, value in measured.items()}

    def measure() -> dict[str, float]:
        with _saved_if_refused(run, rounds.place):
            return evaluate(run, rounds.collector, prompts.held_out, f"at {run.progress.step}")

    if prompts.held_out and not run.is_evaluated:
        run.evaluate(measure)
    while run.progress.step < config.max_steps:
        clock = Clock(run.device)
        clock.mark("start")
        with run.profiler.step(run.progress.step + 1):
            with _saved_if_refused(run, rounds.place):
                rollouts, rollout_metrics = rounds.next_rollouts()
            record, policy_metrics = rounds.policy.step(clock, rollouts)
        run.log(record, rollout_metrics | policy_metrics | at_start)
        at_start = {}
        if record.step % max(1, config.max_steps // SAMPLES_A_RUN) == 0:
            run.say(sample_text(rollouts[0]))
        if prompts.held_out and is_due(config.val.interval, record.step, config.max_steps):
            run.evaluate(measure)
        run.stop_if_asked()
        run.save_if_due(rounds.place.state_dict())


@contextmanager
def _saved_if_refused(run: Run, place: Place) -> Iterator[None]:
    """Save the state before the block where a user's error ends it: once mended, the run goes on.

    Collective: then as `Run.save_if_due`; the block raises on all ranks.
    """
    try:
        yield
    except UserError as error:
        step = run.progress.step
        if step == 0:
            raise
        run.save_if_due(place.state_dict(), now=True)
        raise UserError(f"{error}; the state after step {step} is saved") from None


def evaluate(
    run: Run, collector: Collector, held_out: Sequence[Prompt], moment: str
) -> dict[str, float]:
    """Answer the held-out prompts greedily; return the pass rate and the mean scores.

    Raises:
        Interrupted: a signal asked for an end.

    Collective: as `Collector.evaluate`.
    """
    began = time.perf_counter()
    answers = collector.evaluate(held_out, run.progress.step)
    metrics = {
        **pass_rates("val/pass_rate", answers),
        "val/reward": fmean(rollout.reward for rollout in answers),
        "val/errors": sum(rollout.num_errors for rollout in answers),
        "time/evaluate": time.perf_counter() - began,
    }
    for name in answers[0].scores:
        metrics[f"val/reward/{name}"] = fmean(rollout.scores[name] for rollout in answers)
    pass_rate = metrics["val/pass_rate"]
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
