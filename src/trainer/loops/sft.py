"""Supervised fine-tuning, from a config to saved weights."""

from transformers import PreTrainedTokenizerFast

from trainer.config import SFTConfig
from trainer.data import SFTData, setup_sft_data, setup_tokenizer
from trainer.loops.assembly import RunParts, open_run
from trainer.loops.evaluate import mean_loss
from trainer.loops.greedy import answer_greedily, samples_text
from trainer.loops.run import Run
from trainer.loops.run_folder import origin_of
from trainer.loops.supervised import train
from trainer.parallel.agreement import Ranks
from trainer.parallel.world import open_world
from trainer.saved_steps import CHECKPOINTS, step_folder

NUM_SAMPLES_SHOWN = 3


def run_sft(config: SFTConfig) -> None:
    """Run `trainer sft`.

    Raises:
        UserError: the config, the data or the folder does not allow the run.
        Interrupted: a signal asked for an end; the state is saved.

    Collective: every rank of the launch calls it.
    """
    with open_world(config.parallel) as world:
        tokenizer, data = Ranks().together(lambda: _setup_data(config))
        parts = RunParts(config, world, tokenizer, "SFT", data.train)
        with open_run(parts) as (run, is_resumed):
            run.say(data.description)
            if config.val.interval and not data.validation_packs:
                run.say(
                    f"val.interval={config.val.interval}: neither val.source nor val.fraction is "
                    "given, so there is nothing to evaluate"
                )
            if not is_resumed:
                show_answers(run, config, data, "before training")
            train(run, config, data.train, lambda: evaluate(run, config, data))
            run.say("\n".join(run.where_things_lie() + _what_next(run)))


def _setup_data(config: SFTConfig) -> tuple[PreTrainedTokenizerFast, SFTData]:
    tokenizer = setup_tokenizer(config.data, origin_of(config))
    return tokenizer, setup_sft_data(config.data, config.val, tokenizer, config.seed)


def evaluate(run: Run, config: SFTConfig, data: SFTData) -> dict[str, float]:
    """Return the validation loss and, after the last step, how many answers are exactly right.

    Collective: as `mean_loss` and `answer_greedily`.
    """
    metrics: dict[str, float] = {}
    if data.validation_packs:
        metrics["val/loss"] = mean_loss(run, data.validation_packs, config.data)
    if run.progress.step == config.max_steps:
        exact_match = show_answers(run, config, data, "after training")
        if exact_match is not None:
            metrics["val/exact_match"] = exact_match
    return metrics


def show_answers(run: Run, config: SFTConfig, data: SFTData, moment: str) -> float | None:
    """Answer the held-out questions and show a few; return the part answered right.

    Collective: as `answer_greedily`; nothing without held-out questions.
    """
    if not data.held_out:
        return None
    result = answer_greedily(run, data.held_out, config.val.max_new_tokens)
    run.say(samples_text(f"greedy answers {moment}", data.held_out, result, NUM_SAMPLES_SHOWN))
    run.say(f"  always giving the most common training answer: {data.majority_rate:.3f}")
    return result.exact_match


def _what_next(run: Run) -> list[str]:
    step, folder = run.progress.step, run.folder
    return [
        "next:",
        f"  trainer sft @ {folder / 'config.toml'} --output-dir NEW_FOLDER --max-steps N",
        f"  trainer sft @ {folder / 'config.toml'} --ckpt.resume latest --max-steps {2 * step}",
        f"  trainer export {step_folder(folder / CHECKPOINTS, step)} OUT",
    ]
