"""One training step of a tiny model whose packs are dealt to the ranks."""

import torch.distributed as dist
from torch.optim import Optimizer
from transformers import PreTrainedModel

from tests.support.networks import packed_batch

LENGTHS = [[5, 7], [12], [3, 4, 5], [6, 6]]


def train_step(model: PreTrainedModel, optimizer: Optimizer, *, seed: int = 0) -> None:
    """Take one step on the same four packs, whatever the number of ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ids_PS, positions_PS, targets_PS = packed_batch(LENGTHS, seed=seed)
    mine = slice(rank, None, size)
    outputs = model(ids_PS[mine], position_ids=positions_PS[mine], target_ids=targets_PS[mine])
    loss = -outputs.log_probs_PS.sum() / (targets_PS != -100).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
