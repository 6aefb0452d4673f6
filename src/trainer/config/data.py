"""The `data` and `val` sections: sources, tokenization, masks, packing."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from trainer.config.base import (
    Bool,
    Count,
    CountOrZero,
    FreeTable,
    FunctionPath,
    Int,
    OpenFraction,
    PathText,
    PositiveFloat,
    Section,
    Text,
)


class FilesSource(Section):
    """A local JSONL or Parquet file, or a folder of them."""

    type: Literal["files"] = "files"
    path: PathText
    weight: PositiveFloat = 1.0
    """Share of rows in a mix, on any scale."""


class HubSource(Section):
    """A data set on the Hugging Face hub."""

    type: Literal["hub"] = "hub"
    name: Text
    subset: Text | None = None
    split: Text = "train"
    weight: PositiveFloat = 1.0
    """Share of rows in a mix, on any scale."""


class ReasoningGymSource(Section):
    """A procedurally generated reasoning-gym task."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    task: Text
    size: Count
    seed: Int = 0
    start: CountOrZero = 0
    """Index of the first item: splits are index ranges of one seed (seeds overlap)."""
    params: FreeTable = {}
    """The task's own settings, such as `min_word_len`."""
    template: str = "{question}"
    """Text of the user turn; fields: `question` and what the task puts into an item's metadata."""
    system: str | None = None
    """Text of a system turn before it."""
    weight: PositiveFloat = 1.0
    """Share of rows in a mix, on any scale."""


class FunctionSource(Section):
    """The rows that a function of yours returns: a list, or anything with a length and an index."""

    type: Literal["function"] = "function"
    path: FunctionPath
    """`module:function`; the module is imported with the working directory on the path. Called once
    on every rank and again after a resume: it must return the same rows each time. Start and resume
    compare every row of a list of up to 100,000; of a longer one, or of rows made on the fly, the
    number of rows and 16 to 31 of them."""
    params: FreeTable = {}
    """Its keyword arguments."""
    weight: PositiveFloat = 1.0
    """Share of rows in a mix, on any scale."""


SingleSource = Annotated[
    FilesSource | HubSource | ReasoningGymSource | FunctionSource, Field(discriminator="type")
]


class MixSource(Section):
    """A weighted mix of sources."""

    type: Literal["mix"] = "mix"
    sources: Annotated[tuple[SingleSource, ...], Field(min_length=1)]


Source = Annotated[
    FilesSource | HubSource | ReasoningGymSource | FunctionSource | MixSource,
    Field(discriminator="type"),
]


class BatchConfig(Section):
    """What every stream of packs has."""

    seq_len: Count = 2048
    """Tokens of a pack."""
    batch_size: Count = 8
    """Packs a step, over all ranks."""
    micro_batch_size: Count = 1
    """Packs a forward pass on one rank."""
    shuffle: Bool = True
    """Another order in every epoch; false: as the rows lie."""
    pack_lookahead: Count = 64
    """Samples considered at once when filling packs."""
    prefetch: Bool = True
    """Prepare the next batch in a thread while the step runs."""


class DataConfig(BatchConfig):
    """Training data: from rows to packs of `seq_len` tokens."""

    source: Source
    tokenizer: PathText | None = None
    """Folder or hub name; unset: the model's own, else the built-in byte-level tokenizer."""
    chat_template: PathText | None = None
    """Path of a Jinja file that replaces the tokenizer's chat template."""
    template_kwargs: FreeTable = {}
    """Variables for the chat template, such as `enable_thinking`."""
    train_on: Literal["all", "last"] = "all"
    """Which assistant turns are trained on."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What a row that cannot be read does; skipped ones are counted in the metrics."""
    overlong: Literal["error", "drop", "truncate"] = "error"
    """What happens to a sample longer than `seq_len`, unless `split_samples`."""
    split_samples: Bool = False
    """Whether a sample may continue in the next pack."""


class IntervalConfig(Section):
    """When a run is evaluated."""

    interval: CountOrZero = 0
    """Every n steps, and at the end; 0: only at the end."""


class ValConfig(IntervalConfig):
    """Held-out evaluation."""

    source: Source | None = None
    fraction: OpenFraction = 0.0
    """Part of the training rows held out when no source is given."""
    max_packs: Count | None = None
    """Packs evaluated; unset: all."""
    num_generate: CountOrZero = 0
    """Held-out prompts answered greedily before and after training, scored by exact match."""
    max_new_tokens: Count = 64
    """Longest greedy answer."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.source is not None and self.fraction > 0:
            raise ValueError(
                f"source and fraction={self.fraction} are both given: validation rows come from "
                "one place; remove one"
            )
        return self
