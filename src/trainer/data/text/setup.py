"""Everything a pretraining run needs from its `data` and `val` sections.

Start reading here, then `stream.py`. Reads each source's first page; of validation, what is
evaluated.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from transformers import PreTrainedTokenizerFast

from trainer.config.pretrain import PretrainDataConfig, PretrainSource, PretrainValConfig
from trainer.data.host_memory import check_packs
from trainer.data.packing import Pack
from trainer.data.prefetch import PrefetchedStream
from trainer.data.text.documents import DocumentReader, HashSplit
from trainer.data.text.encode import TextEncoder, TokenizerIdentity, identify
from trainer.data.text.pages import Content, Shuffle
from trainer.data.text.queue import PackQueue
from trainer.data.text.sources import open_source, single_sources, source_fields, source_names
from trainer.data.text.stream import PretrainStream
from trainer.data.text.token_bytes import token_bytes, trained_bytes


@dataclass(frozen=True, eq=False)
class PretrainData:
    """The data of a run.

    Args:
        train: stream of packs, asked for `data.batch_size` at a time.
        source_names: of the sources of the mix, by index.
        validation_packs: never trained on; empty without validation.
        validation_bytes: of text that their targets stand for.
        prompts: `val.prompts` as ids.
        description: a line for people.
    """

    train: PretrainStream | PrefetchedStream
    source_names: tuple[str, ...]
    validation_packs: list[Pack]
    validation_bytes: int
    prompts: tuple[tuple[int, ...], ...]
    description: str


def setup_pretrain_data(
    data: PretrainDataConfig,
    val: PretrainValConfig,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
) -> PretrainData:
    """Open the sources, read the validation packs, and build the training stream.

    Args:
        data: the `data` section.
        val: the `val` section.
        tokenizer: of the run.
        seed: of the shuffle.

    Raises:
        UserError: a source cannot be opened, its shards are incomplete or of another tokenizer, or
            there is nothing to validate on; or a step's packs do not fit the host.
    """
    check_packs(data)
    texts = TextSetup(TextEncoder(tokenizer), identify(tokenizer), data)
    packs = texts.validation_packs(val)
    names = tuple(source_names(data.source))
    stream = texts.stream(names, HashSplit(val.fraction), seed)
    return PretrainData(
        train=PrefetchedStream(stream, data.batch_size) if data.prefetch else stream,
        source_names=names,
        validation_packs=packs,
        validation_bytes=trained_bytes(packs, token_bytes(tokenizer)),
        prompts=tuple(tuple(texts.encoder.prompt_ids(prompt)) for prompt in val.prompts),
        description=_describe(names, data, packs),
    )


@dataclass(frozen=True)
class TextSetup:
    """What opening sources takes: one encoder, its tokenizer's identity, the `data` section."""

    encoder: TextEncoder
    identity: TokenizerIdentity
    data: PretrainDataConfig

    def stream(self, names: Sequence[str], split: HashSplit, seed: int) -> PretrainStream:
        """Return the stream of training packs, without the documents that `split` holds out."""
        source = self.data.source
        queues = self._queues(
            source,
            "data.source",
            str(seed) if self.data.shuffle else None,
            keeps=lambda content: not split.holds_out(content),
        )
        identity = {
            "seed": seed,
            "data.shuffle": self.data.shuffle,
            "val.fraction": split.fraction,
            "the tokenizer's fingerprint": self.identity.fingerprint,
        }
        weights = [part.weight for part in single_sources(source)]
        return PretrainStream(queues, names, weights, identity)

    def validation_packs(self, val: PretrainValConfig) -> list[Pack]:
        """Return the first `val.max_packs` packs of each validation source.

        Held-out documents are taken in an order of their own, the same in every run.

        Raises:
            UserError: a source cannot be read, or has nothing to validate on.
        """
        if val.source is not None:
            queues = self._queues(val.source, "val.source", None, purpose="evaluated", max_epochs=1)
        elif val.fraction:
            keeps = HashSplit(val.fraction).holds_out
            queues = self._queues(
                self.data.source,
                "data.source",
                "held out",
                purpose="held out",
                keeps=keeps,
                max_epochs=1,
            )
        else:
            return []
        return [pack for queue in queues for pack in _first_packs(queue, val.max_packs)]

    def _queues(
        self,
        source: PretrainSource,
        field: str,
        shuffle_key: str | None,
        *,
        purpose: str = "trained on",
        keeps: Callable[[Content], bool] = lambda content: True,
        max_epochs: int | None = None,
    ) -> list[PackQueue]:
        """Open every source of a mix; `max_epochs` goes before the sources' own."""
        queues = []
        fields = source_fields(source, field)
        for index, (part, name) in enumerate(zip(single_sources(source), fields, strict=True)):
            shuffle = Shuffle(None if shuffle_key is None else f"{shuffle_key}/{index}")
            reader = DocumentReader(
                open_source(part, name, shuffle, self.identity),
                self.encoder.encode,
                field=name,
                purpose=purpose,
                keeps=keeps,
                max_epochs=max_epochs or part.max_epochs,
            )
            queues.append(PackQueue(reader, self.data, index))
        return queues


def _first_packs(queue: PackQueue, num_packs: int) -> Iterator[Pack]:
    for _ in range(num_packs):
        pack = queue.next_pack()
        if pack is None:
            return
        yield pack


def _describe(names: Sequence[str], data: PretrainDataConfig, packs: Sequence[Pack]) -> str:
    weights = [Fraction(part.weight) for part in single_sources(data.source)]
    parts = zip(names, weights, strict=True)
    shares = [f"{name} {float(weight / sum(weights)):.1%}" for name, weight in parts]
    neither = "nothing: neither val.source nor val.fraction is given"
    validated = f"{len(packs):,} packs" if packs else neither
    return f"training on {', '.join(shares)}; validating on {validated}"
