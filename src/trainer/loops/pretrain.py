"""Pretraining, from a config to saved weights."""

import math

from transformers import PreTrainedTokenizerFast

from trainer.config.pretrain import PretrainConfig
from trainer.data.text.setup import PretrainData, setup_pretrain_data
from trainer.data.tokenizer import choose_tokenizer
from trainer.loops.assembly import RunParts, open_run
from trainer.loops.continuations import continue_prompts
from trainer.loops.evaluate import mean_loss
from trainer.loops.run import Run
from trainer.loops.run_folder import origin_of
from trainer.loops.supervised import train
from trainer.parallel.agreement import Ranks
from trainer.parallel.world import open_world


def run_pretrain(config: PretrainConfig) -> None:
    """Run `trainer pretrain`.

    Raises:
        UserError: the config, the data or the folder does not allow the run.
        Interrupted: a signal asked for an end; the state is saved.

    Collective: every rank of the launch calls it.
    """
    with open_world(config.parallel) as world:
        tokenizer, data = Ranks().together(lambda: _setup_data(config))
        place, names = data.train, data.source_names
        parts = RunParts(config, world, tokenizer, "pretrain", place, names)
        with open_run(parts) as (run, is_resumed):
            run.say(data.description)
            if not is_resumed:
                show_continuations(run, config, data, "before training")
            train(run, config, data.train, lambda: evaluate(run, config, data))
            run.say("\n".join(run.where_things_lie()))


def _setup_data(config: PretrainConfig) -> tuple[PreTrainedTokenizerFast, PretrainData]:
    tokenizer = choose_tokenizer(config.data.tokenizer, origin_of(config))
    return tokenizer, setup_pretrain_data(config.data, config.val, tokenizer, config.seed)


def evaluate(run: Run, config: PretrainConfig, data: PretrainData) -> dict[str, float]:
    """Return validation loss and bits per byte; after the last step also show continuations.

    Collective: as `mean_loss` and `continue_prompts`.
    """
    metrics: dict[str, float] = {}
    if data.validation_packs:
        loss = mean_loss(run, data.validation_packs, config.data)
        metrics["val/loss"] = loss
        num_trained = sum(pack.num_trained for pack in data.validation_packs)
        metrics["val/bits_per_byte"] = bits_per_byte(loss, num_trained, data.validation_bytes)
    if run.progress.step == config.max_steps:
        show_continuations(run, config, data, "after training")
    return metrics


def bits_per_byte(mean_loss: float, num_trained: int, num_bytes: int) -> float:
    """Return how many bits the model needs for a byte of text: comparable between tokenizers.

    Args:
        mean_loss: nats a trained token.
        num_trained: trained tokens, ends of documents included.
        num_bytes: of the text that they stand for; no bytes count as one.
    """
    return mean_loss * num_trained / (math.log(2) * max(1, num_bytes))


def show_continuations(run: Run, config: PretrainConfig, data: PretrainData, moment: str) -> None:
    """Continue `val.prompts` and show the texts; nothing without prompts.

    Collective: as `continue_prompts`.
    """
    if not data.prompts:
        return
    texts = continue_prompts(
        run,
        data.prompts,
        max_new_tokens=config.val.max_new_tokens,
        temperature=config.val.temperature,
    )
    run.say(f"samples {moment} (temperature {config.val.temperature}):")
    for prompt, text in zip(config.val.prompts, texts, strict=True):
        run.say(f"--- {prompt!r} goes on:\n{prompt}{text}")
    run.say("---")
