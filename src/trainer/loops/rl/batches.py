"""From rollouts to packed tensors with everything the policy loss reads.

Owns which rollouts are trained on, the weight of each token and the layout of the streams beside
the tokens. Packing itself is `trainer.data.packing`'s; the loss `trainer.losses.rl`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.config import RLConfig
from trainer.data.packing import (
    Document,
    Pack,
    PackedBatch,
    Sample,
    micro_batches,
    send,
    take_best_fit,
)
from trainer.parallel.world import World
from trainer.rl.rollouts import Rollout

RolloutPack = tuple[Rollout, ...]
"""Rollouts that share one row of `data.seq_len` positions."""


@dataclass(frozen=True)
class PolicyBatch:
    """A micro-batch of packs on this rank.

    Attributes:
        packed: Tokens, positions, targets, weights.
        packs: The rollouts in it; fewer than rows where the last are padding.
        sampler_log_probs_PS: fp32, at the position that predicts the token; 0 elsewhere.
        old_log_probs_PS: fp32, the same of the trainer's before the first update.
        advantages_PS: fp32.
        completions_PS: int64, which rollout of the micro-batch predicts there, from 0.
    """

    packed: PackedBatch
    packs: Sequence[RolloutPack]
    sampler_log_probs_PS: Tensor
    old_log_probs_PS: Tensor
    advantages_PS: Tensor
    completions_PS: Tensor


@dataclass(frozen=True)
class _Item:
    """A rollout that waits for its pack."""

    rollout: Rollout

    def __len__(self) -> int:
        return len(self.rollout.prompt_ids) + len(self.rollout.ids)


def trained_rollouts(rollouts: Sequence[Rollout], config: RLConfig) -> list[Rollout]:
    """Return the rollouts to train on: all, or those that were not truncated."""
    is_masking = config.rollout.truncated == "mask"
    return [rollout for rollout in rollouts if not (is_masking and rollout.is_truncated)]


def pack_rollouts(rollouts: Sequence[Rollout], seq_len: int) -> list[RolloutPack]:
    """Pack rollouts in one global order; at least one pack, which may be empty."""
    pending = [_Item(rollout) for rollout in rollouts]
    packs: list[RolloutPack] = []
    while pending or not packs:
        taken = take_best_fit(pending, _no_refill, seq_len)
        packs.append(tuple(item.rollout for item in taken))
    return packs


def policy_packs(packs: Sequence[RolloutPack], config: RLConfig) -> list[Pack]:
    """Return the packs as documents whose completions are trained."""
    return [Pack(tuple(_document(rollout, config) for rollout in pack)) for pack in packs]


def policy_batches(
    packs: Sequence[RolloutPack], config: RLConfig, world: World, pad_id: int
) -> list[PolicyBatch]:
    """Return this rank's micro-batches on its device, equally many on every rank."""
    size = config.data.micro_batch_size
    batches = micro_batches(
        policy_packs(packs, config),
        rank=world.rank,
        world_size=world.size,
        micro_batch_size=size,
        seq_len=config.data.seq_len,
        pad_id=pad_id,
    )
    return [
        _with_streams(batch.to(world.device), own)
        for batch, own in zip(batches, own_packs(packs, size, world), strict=True)
    ]


def own_packs(packs: Sequence[RolloutPack], size: int, world: World) -> list[Sequence[RolloutPack]]:
    """Return the packs of each of this rank's micro-batches of `size`; the last may lack some."""
    own = packs[world.rank :: world.size]
    return [own[i : i + size] for i in range(0, -(-len(packs) // world.size), size)]


def predicting(pack: RolloutPack) -> list[slice]:
    """Return, for each rollout of a pack, the positions that predict its completion."""
    slices, start = [], 0
    for rollout in pack:
        first = start + len(rollout.prompt_ids) - 1
        slices.append(slice(first, first + len(rollout.ids)))
        start += len(rollout.prompt_ids) + len(rollout.ids)
    return slices


def _no_refill() -> None:
    """All that is to be packed waits already."""


def _document(rollout: Rollout, config: RLConfig) -> Document:
    is_by_sequence = config.loss.reduction == "sequence"
    weight = 1 / len(rollout.ids) if is_by_sequence else 1.0
    weights = np.zeros(len(rollout.prompt_ids) + len(rollout.ids), dtype=np.float32)
    weights[len(rollout.prompt_ids) :] = weight
    ids = np.asarray([*rollout.prompt_ids, *rollout.ids], dtype=np.int64)
    return Document.from_sample(Sample(ids, weights))


def _with_streams(batch: PackedBatch, packs: Sequence[RolloutPack]) -> PolicyBatch:
    shape, device = tuple(batch.input_ids_PS.shape), batch.input_ids_PS.device
    sampler, old, advantages = (np.zeros(shape, dtype=np.float32) for _ in range(3))
    completions = np.zeros(shape, dtype=np.int64)
    number = 0
    for row, pack in enumerate(packs):
        for rollout, where in zip(pack, predicting(pack), strict=True):
            sampler[row, where] = rollout.log_probs
            old[row, where] = rollout.old_log_probs or rollout.log_probs
            advantages[row, where] = rollout.advantage
            completions[row, where] = number
            number += 1

    return PolicyBatch(
        batch,
        packs,
        send(torch.from_numpy(sampler), device),
        send(torch.from_numpy(old), device),
        send(torch.from_numpy(advantages), device),
        send(torch.from_numpy(completions), device),
    )
