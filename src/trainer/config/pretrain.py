"""The whole config of `trainer pretrain`: sources of text and tokens, and how they are mixed."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from trainer.config.base import (
    Bool,
    Count,
    NonNegativeFloat,
    OpenFraction,
    PathText,
    PositiveFloat,
    Section,
    Text,
)
from trainer.config.data import BatchConfig, IntervalConfig
from trainer.config.sft import SupervisedConfig


class SourceSection(Section):
    """What every source of a mix has."""

    name: Text | None = None
    """Under which it is logged (`loss/<name>`); unset: from its path or hub name."""
    weight: PositiveFloat = 1.0
    """Relative share of the packs, exact at every moment to within one pack."""
    max_epochs: Count | None = None
    """How often it may be gone through; after that the other sources share its part."""


TEXT_SUFFIXES = (
    *(".txt", ".jsonl", ".parquet"),
    *(".txt.gz", ".jsonl.gz", ".txt.zst", ".jsonl.zst"),
)


class TextFilesSource(SourceSection):
    """Text or JSONL, plain or compressed, or Parquet: a file, or a folder of one of the three."""

    type: Literal["files"] = "files"
    path: PathText
    suffixes: Annotated[tuple[Text, ...], Field(min_length=1)] = TEXT_SUFFIXES
    """Files of a folder that are read, in any case of letters. Behind .gz and .zst lies what is
    packed; any suffix but .jsonl and .parquet is plain text."""
    column: Text = "text"
    """Field of a JSONL or Parquet row that holds the text."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A JSONL row that is no JSON or has no text; skip: left out, the first ten and then one at
    every tenfold with a line in the log."""
    block_kib: Count = 256
    """Text read at once; a plain text file that is longer becomes several documents, cut at line
    ends."""


class StdlibSource(SourceSection):
    """The Python sources of the standard library: real text that every machine has."""

    type: Literal["stdlib"] = "stdlib"


class HubTextSource(SourceSection):
    """A data set on the Hugging Face hub, or a folder that `datasets` can load."""

    type: Literal["hub"] = "hub"
    path: PathText
    """Name on the hub, or a folder."""
    subset: Text | None = None
    split: Text = "train"
    column: Text = "text"
    streaming: Bool = False
    """Read over the network as needed instead of downloading all of it first."""


class TokensSource(SourceSection):
    """Token shards: a folder that `trainer tokenize` wrote."""

    type: Literal["tokens"] = "tokens"
    path: PathText
    verify: Bool = False
    """Read everything once before step 1 and compare checksums; sizes are always compared."""


SinglePretrainSource = Annotated[
    TextFilesSource | StdlibSource | HubTextSource | TokensSource, Field(discriminator="type")
]


class PretrainMixSource(Section):
    """A weighted mix of sources."""

    type: Literal["mix"] = "mix"
    sources: Annotated[tuple[SinglePretrainSource, ...], Field(min_length=1)]


PretrainSource = Annotated[
    TextFilesSource | StdlibSource | HubTextSource | TokensSource | PretrainMixSource,
    Field(discriminator="type"),
]


class PretrainDataConfig(BatchConfig):
    """Training data: from documents to packs of `seq_len` tokens, one source a pack."""

    source: PretrainSource
    tokenizer: PathText | None = None
    """Folder or hub name; unset: the model's own, else the built-in byte-level tokenizer."""
    split_documents: Bool = True
    """Fill packs to the brim, a document going on in the next pack; false: best fit of whole
    documents, only those longer than `seq_len` are cut."""
    pack_lookahead: Count = 64
    """Documents of a source open at once: packs take turns among them, or fit the best; 1: one
    document after another."""
    attend_across_documents: Bool = False
    """Whether a document sees those before it in its pack; false: attention stays inside."""


class PretrainValConfig(IntervalConfig):
    """Held-out documents, and texts continued for people to look at."""

    source: PretrainSource | None = None
    """Its documents are evaluated as they lie, the first `max_packs` packs of each source."""
    fraction: OpenFraction = 0.0
    """Part of the training documents held out when no source is given, chosen by their text, so
    that copies stay together."""
    max_packs: Count = 64
    """Packs evaluated per source."""
    prompts: tuple[Text, ...] = ()
    """Continued before and after training."""
    max_new_tokens: Count = 128
    temperature: NonNegativeFloat = 0.8
    """Of those continuations; 0: always the most likely token."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.source is not None and self.fraction > 0:
            raise ValueError(
                f"source and fraction={self.fraction} are both given: validation documents come "
                "from one place; remove one"
            )
        return self


class PretrainConfig(SupervisedConfig):
    """Pretraining on text or tokens."""

    data: PretrainDataConfig
    val: PretrainValConfig = PretrainValConfig()
