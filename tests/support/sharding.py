"""Cuts full tensors into DTensors by torch's dealing rules, written apart from the code tested."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard


def cut(
    full: Tensor, sizes: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> Tensor:
    """Return the shard of a full tensor at a coordinate of a mesh of these sizes."""
    shard = full
    for size, here, placement in zip(sizes, coordinate, placements, strict=True):
        if isinstance(placement, _StridedShard):
            pieces = _chunks(shard, placement.split_factor, placement.dim)
            parts = [_chunks(piece, size, placement.dim)[here] for piece in pieces]
            shard = torch.cat(parts, dim=placement.dim)
        elif isinstance(placement, Shard):
            shard = _chunks(shard, size, placement.dim)[here]
    return shard.contiguous()


def shard_of(full: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """Return this rank's shard of a full tensor."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return cut(full, mesh.shape, coordinate, placements)


def distribute(full: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return a DTensor holding this rank's shard of a full tensor; no communication."""
    return DTensor.from_local(
        shard_of(full, mesh, placements).clone(),
        mesh,
        placements,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )


def _chunks(tensor: Tensor, count: int, dim: int) -> list[Tensor]:
    chunks = list(tensor.chunk(count, dim))
    empty = tensor.narrow(dim, 0, 0)
    return chunks + [empty] * (count - len(chunks))
