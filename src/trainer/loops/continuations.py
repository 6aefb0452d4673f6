"""Texts that a pretrained model goes on with, for people to look at."""

from collections.abc import Sequence

from trainer.loops.run import Run
from trainer.model.inference import inference
from trainer.rl.engine import Request, Sampling
from trainer.rl.local import LocalEngine


def continue_prompts(
    run: Run,
    prompts: Sequence[tuple[int, ...]],
    *,
    max_new_tokens: int,
    temperature: float,
) -> list[str]:
    """Return what the model writes after each prompt, up to the end of its document.

    The same on any number of ranks: the draw depends on the prompt's index alone.

    Args:
        run: Its model generates.
        prompts: Token ids; not empty.
        max_new_tokens: Longest continuation.
        temperature: 0: the most likely token, always.

    Raises:
        Interrupted: a signal asked for an end.

    Collective: every rank decodes every prompt, in step with the others, after
        `Run.stop_if_asked`.
    """
    end = run.tokenizer.eos_token_id
    assert isinstance(end, int), "the encoder refuses tokenizers without one"
    engine = LocalEngine(
        run.model, inference, run.device, pad_id=run.pad_id, batch_size=len(prompts)
    )
    requests = [Request(prompt, ((index,),)) for index, prompt in enumerate(prompts)]
    sampling = Sampling(max_new_tokens, temperature, 1.0, 0, (end,))
    completions = engine.generate(requests, sampling, run.stop_if_asked)
    return [
        str(run.tokenizer.decode(list(completion.ids), skip_special_tokens=True))
        for (completion,) in completions
    ]
