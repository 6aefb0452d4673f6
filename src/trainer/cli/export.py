"""`trainer export CHECKPOINT OUT`: Hugging Face weights from a checkpoint, without ranks."""

from pathlib import Path

from trainer.cli.words import place, split_words
from trainer.errors import UserError

USAGE = """\
usage: trainer export CHECKPOINT OUT [--dtype bfloat16|float16|float32] [--max-shard-gib N]

Writes the weights of CHECKPOINT (a folder checkpoints/step_N of a run) into the new folder OUT:
safetensors, config and tokenizer, as plain transformers loads them."""


def export(args: list[str]) -> None:
    """Run `trainer export`.

    Raises:
        UserError: words are missing or not understood, or the checkpoint cannot be exported.
    """
    if "--help" in args or "-h" in args:
        print(USAGE)
        return
    words = split_words(args, {"dtype": "bfloat16", "max-shard-gib": "5"})
    if len(words.places) != 2:
        raise UserError(
            f"export takes two folders, CHECKPOINT and OUT, {len(words.places)} given; "
            "write 'trainer export outputs/run/checkpoints/step_100 weights'"
        )
    max_shard_gib = _positive_number("max-shard-gib", words.options["max-shard-gib"])
    checkpoint = Path(place("CHECKPOINT", words.places[0]))
    out = Path(place("OUT", words.places[1]))
    from trainer.checkpoint.export import export_checkpoint

    export_checkpoint(checkpoint, out, words.options["dtype"], max_shard_gib)
    print(
        f"weights written to {out}; AutoModelForCausalLM.from_pretrained({str(out)!r}) loads them"
    )


def _positive_number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise UserError(f"--{name} {text}: must be a number above 0; correct it")
    return number
