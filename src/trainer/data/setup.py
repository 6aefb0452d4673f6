"""Everything a run of supervised fine-tuning needs from its `data` and `val` sections.

Start reading here, then `stream.py`.
"""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from trainer.config.data import DataConfig, ValConfig
from trainer.data.encode import SampleEncoder
from trainer.data.held_out import (
    HeldOut,
    Split,
    held_out_keys,
    majority_rate,
    pack_rows,
    pick_held_out,
    split_rows,
)
from trainer.data.host_memory import check_packs
from trainer.data.packing import Pack
from trainer.data.prefetch import PrefetchedStream
from trainer.data.reader import RowReader
from trainer.data.sources import single_sources
from trainer.data.stream import SFTStream


@dataclass(frozen=True, eq=False)
class SFTData:
    """The data of a run.

    Args:
        train: endless stream of packs, asked for `data.batch_size` at a time.
        validation_packs: the validation set; empty without one.
        held_out: `val.num_generate` questions that are never trained on.
        majority_rate: part of them that the most common training answer gets right.
        description: a line for people.
    """

    train: SFTStream | PrefetchedStream
    validation_packs: list[Pack]
    held_out: tuple[HeldOut, ...]
    majority_rate: float | None
    description: str


def setup_sft_data(
    data: DataConfig, val: ValConfig, tokenizer: PreTrainedTokenizerFast, seed: int
) -> SFTData:
    """Open the sources, hold validation out, and build the training stream.

    Reads the validation rows, and a sample of training rows (`samples.py`); the others are read
    when their turn comes.

    Args:
        data: the `data` section.
        val: the `val` section.
        tokenizer: from `setup_tokenizer`.
        seed: of the shuffle.

    Raises:
        UserError: a source is missing or empty, a validation row is bad (see `data.on_bad_row` and
            `data.overlong`), or a step's packs do not fit the host.
    """
    check_packs(data)
    encoder = SampleEncoder(tokenizer, data)
    split = split_rows(data, val)
    val_reader = RowReader(encoder, data)
    packs = pack_rows(split.validation, val_reader, data, val.max_packs)
    held_out = pick_held_out(split.validation, val_reader, encoder, val.num_generate)
    reader = RowReader(encoder, data, held_out_keys(split.validation, val_reader))
    weights = [source.weight for source in single_sources(data.source)]
    stream = SFTStream(split.train, weights, reader, data, seed, split.fingerprints)
    return SFTData(
        train=PrefetchedStream(stream, data.batch_size) if data.prefetch else stream,
        validation_packs=packs,
        held_out=held_out,
        majority_rate=majority_rate(split.train, val_reader, held_out),
        description=_describe(split, packs, held_out),
    )


def _describe(split: Split, packs: list[Pack], held_out: tuple[HeldOut, ...]) -> str:
    num_train = sum(len(rows) for rows in split.train)
    text = f"{num_train:,} training rows from {len(split.train)} source(s)"
    if split.validation:
        num_val = sum(len(rows) for rows in split.validation)
        text += f"; {num_val:,} validation rows, {len(packs):,} packs evaluated"
    if held_out:
        text += f"; {len(held_out):,} held-out questions, none of them trained on"
    return text
