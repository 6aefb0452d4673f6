"""Samples for people: what is trained stands in brackets."""

from itertools import groupby

from transformers import PreTrainedTokenizerFast

from trainer.data.packing import Sample


def mark_trained(sample: Sample, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a sample's text with every run of trained tokens between ⟦ and ⟧."""
    text = ""
    trained = (sample.weights > 0).tolist()
    for is_trained, run in groupby(zip(sample.ids.tolist(), trained, strict=True), lambda x: x[1]):
        piece = str(tokenizer.decode([token for token, _ in run]))
        text += f"⟦{piece}⟧" if is_trained else piece
    return text
