"""Documents, the packs they fill, and the tensors made of packs.

Owns the shift by one (targets), the choice of documents for a pack, and padding. A pack is plain
data in the one global order; ranks take theirs with `deal`. Read `stream.py` next.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

MASKED = -100


@dataclass(frozen=True, eq=False)
class Sample:
    """Tokens of one text.

    Args:
        ids: int64 [n].
        weights: float32 [n], weight of the loss of predicting this token; 0: not trained.
    """

    ids: np.ndarray
    weights: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_trained(self) -> int:
        """Tokens that are predicted from a token before them and count in the loss."""
        return int(np.count_nonzero(self.weights[1:]))

    def truncate(self, num_tokens: int) -> "Sample":
        """Return the first `num_tokens` tokens."""
        return Sample(self.ids[:num_tokens], self.weights[:num_tokens])


@dataclass(frozen=True, eq=False)
class Document:
    """A sample after the shift: position t predicts token t + 1; the last token predicts nothing.

    Args:
        ids: int64 [n].
        targets: int64 [n], -100 where nothing is trained.
        weights: float32 [n], 0 where nothing is trained.
        source: index of the source in the mix.
    """

    ids: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    source: int

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def from_sample(cls, sample: Sample, source: int = 0) -> Self:
        """Shift a sample."""
        weights = np.append(sample.weights[1:], np.float32(0)).astype(np.float32)
        following = np.append(sample.ids[1:], MASKED).astype(np.int64)
        return cls(sample.ids, np.where(weights > 0, following, MASKED), weights, source)

    def piece(self, start: int, stop: int) -> "Document":
        """Return positions `start:stop`; the last keeps its target, the first token of the rest."""
        return Document(
            self.ids[start:stop], self.targets[start:stop], self.weights[start:stop], self.source
        )


@dataclass(frozen=True, eq=False)
class Pack:
    """Documents that share one row of `seq_len` positions; empty: all padding."""

    documents: tuple[Document, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Positions that hold a document's token."""
        return sum(len(document) for document in self.documents)

    @property
    def num_trained(self) -> int:
        """Positions that have a target."""
        return sum(int(np.sum(d.targets != MASKED)) for d in self.documents)


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Packs as tensors, on one rank.

    Args:
        input_ids_PS: int64.
        position_ids_PS: int64, restarts at 0 with every document and with the padding.
        target_ids_PS: int64, already shifted; -100 where nothing is trained.
        weights_PS: float32, 0 where nothing is trained.
        token_mask_PS: bool, False for padding.
        sources_PS: int64, index in the mix of the source that a token is of; 0 for padding.
        target_rows_N: int64, the places among all `P·S` positions that have a target, in order.
        num_tokens: positions that are no padding.
        num_trained: positions with a target.
    """

    input_ids_PS: Tensor
    position_ids_PS: Tensor
    target_ids_PS: Tensor
    weights_PS: Tensor
    token_mask_PS: Tensor
    sources_PS: Tensor
    target_rows_N: Tensor
    num_tokens: int
    num_trained: int

    def to(self, device: torch.device | str) -> "PackedBatch":
        """Return the same batch on a device, as `send` brings it there."""
        return PackedBatch(
            send(self.input_ids_PS, device),
            send(self.position_ids_PS, device),
            send(self.target_ids_PS, device),
            send(self.weights_PS, device),
            send(self.token_mask_PS, device),
            send(self.sources_PS, device),
            send(self.target_rows_N, device),
            self.num_tokens,
            self.num_trained,
        )


def send(values: Tensor, device: torch.device | str) -> Tensor:
    """Return values of the host on a device; where that is a GPU, the host goes on meanwhile.

    From pinned memory: a copy from any other may wait for all that is queued.
    """
    if torch.device(device).type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


class HasLength(Protocol):
    """Anything that takes up positions of a pack."""

    def __len__(self) -> int: ...


T = TypeVar("T", bound=HasLength)


def take_best_fit(pending: list[T], refill: Callable[[], None], seq_len: int) -> list[T]:
    """Take from `pending` what fills one pack: the oldest, then always the longest that fits.

    The oldest always goes first, so none waits longer than `len(pending)` packs.

    Args:
        pending: in order of arrival, each at most `seq_len` long; what is taken is removed.
        refill: appends to `pending` up to the lookahead; called before every choice.
        seq_len: positions of the pack.

    Returns:
        What was taken, in order; empty if nothing is pending.
    """
    taken: list[T] = []
    space = seq_len
    while True:
        refill()
        index = 0 if not taken else _longest_that_fits(pending, space)
        if index is None or index >= len(pending):
            return taken
        taken.append(pending.pop(index))
        space -= len(taken[-1])


def _longest_that_fits(pending: Sequence[HasLength], space: int) -> int | None:
    best, best_length = None, 0
    for index, item in enumerate(pending):
        if best_length < len(item) <= space:
            best, best_length = index, len(item)
    return best


def pack_fill(packs: Sequence[Pack], seq_len: int) -> float:
    """Return the part of the positions that hold tokens rather than padding."""
    return sum(pack.num_tokens for pack in packs) / (len(packs) * seq_len)


def deal(packs: Sequence[Pack], rank: int, world_size: int) -> list[Pack]:
    """Return a rank's packs of a global batch: every `world_size`-th."""
    return list(packs[rank::world_size])


def micro_batches(
    packs: Sequence[Pack],
    *,
    rank: int,
    world_size: int,
    micro_batch_size: int,
    seq_len: int,
    pad_id: int,
) -> list[PackedBatch]:
    """Return a rank's part of a global batch as micro-batches, equally many on every rank.

    Where the batch does not divide, the missing packs are padding: they add nothing to any sum. No
    micro-batch is larger than what a rank has.
    """
    own = deal(packs, rank, world_size)
    packs_per_rank = -(-len(packs) // world_size)
    size = min(micro_batch_size, packs_per_rank)
    return [
        collate(own[start : start + size], seq_len, pad_id, size)
        for start in range(0, packs_per_rank, size)
    ]


def collate(
    packs: Sequence[Pack], seq_len: int, pad_id: int, num_packs: int | None = None
) -> PackedBatch:
    """Lay packs out as tensors of `num_packs` (default: as many as given) rows.

    Padding is a document of its own: its positions restart and nothing is trained on it.
    """
    num_packs = len(packs) if num_packs is None else num_packs
    shape = (num_packs, seq_len)
    ids = np.full(shape, pad_id, dtype=np.int64)
    positions = np.empty(shape, dtype=np.int64)
    targets = np.full(shape, MASKED, dtype=np.int64)
    weights = np.zeros(shape, dtype=np.float32)
    token_mask = np.zeros(shape, dtype=bool)
    sources = np.zeros(shape, dtype=np.int64)
    for row in range(num_packs):
        start = 0
        for document in packs[row].documents if row < len(packs) else ():
            stop = start + len(document)
            ids[row, start:stop] = document.ids
            positions[row, start:stop] = np.arange(len(document))
            targets[row, start:stop] = document.targets
            weights[row, start:stop] = document.weights
            token_mask[row, start:stop] = True
            sources[row, start:stop] = document.source
            start = stop
        positions[row, start:] = np.arange(seq_len - start)
    return PackedBatch(
        torch.from_numpy(ids),
        torch.from_numpy(positions),
        torch.from_numpy(targets),
        torch.from_numpy(weights),
        torch.from_numpy(token_mask),
        torch.from_numpy(sources),
        torch.from_numpy(np.flatnonzero(targets != MASKED)),
        sum(pack.num_tokens for pack in packs),
        sum(pack.num_trained for pack in packs),
    )
