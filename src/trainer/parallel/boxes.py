"""Which part of a global tensor a rank holds: one box, whatever the mesh and the placements.

Owns the arithmetic from placements to offsets. It exists beside torch's own because the shards of
an expert stack are `_StridedShard` on one axis and `Shard` on the next, split unevenly, empty at
times, and have to come out the same in every torch version that is supported.
Read `trainer.checkpoint.shards` for its main use.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard


@dataclass(frozen=True)
class Box:
    """A contiguous part of a global tensor: per dim where it starts and how long it is."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """Whether some dim has no extent, so that there is nothing to move."""
        return 0 in self.sizes

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into the global tensor."""
        return tuple(
            slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True)
        )


def local_part(tensor: Tensor) -> Tensor:
    """Return the values that this rank holds, detached and sharing memory with `tensor`."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def local_box(tensor: Tensor) -> Box:
    """Return the box of `tensor` that this rank holds; a plain tensor is held whole.

    Raises:
        RuntimeError: the placements do not leave one box on each rank, or the local shape is not
            the box's.
    """
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.ndim, tuple(tensor.shape))
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "every rank belongs to every mesh"
    box = box_at(
        tuple(tensor.shape), tuple(tensor.device_mesh.shape), tensor.placements, tuple(coordinate)
    )
    local_shape = tuple(local_part(tensor).shape)
    if local_shape != box.sizes:
        raise RuntimeError(
            f"a shard of shape {local_shape} where {tensor.placements} of {tuple(tensor.shape)} "
            f"on a mesh {tuple(tensor.device_mesh.shape)} means {box.sizes}"
        )
    return box


def holds_first_replica(tensor: Tensor, rank: int) -> bool:
    """Say whether this rank is the one that speaks for its box.

    Of a plain tensor that is rank 0, of a DTensor the ranks at 0 on every replicated axis.
    """
    if not isinstance(tensor, DTensor):
        return rank == 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "every rank belongs to every mesh"
    return all(
        index == 0
        for index, placement in zip(coordinate, tensor.placements, strict=True)
        if isinstance(placement, Replicate)
    )


def box_at(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    coordinate: tuple[int, ...],
) -> Box:
    """Return the box of a tensor of `shape` at `coordinate` of a mesh; needs no ranks.

    Raises:
        RuntimeError: a placement that is not a shard or a replica, or a strided one that would
            leave a rank with scattered rows.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    for axis in _split_order(mesh_shape, placements):
        dim = _sharded_dim(placements[axis])
        assert dim is not None
        start, size = chunk_of(sizes[dim], mesh_shape[axis], coordinate[axis])
        offsets[dim] += start
        sizes[dim] = size
    return Box(tuple(offsets), tuple(sizes))


def _split_order(mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> list[int]:
    """Order the sharding axes as the splits happened: plain ones, then strided from the right.

    A strided axis was split after the axes of the same dim to its right, which is what its split
    factor counts.
    """
    for axis, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            behind = 1
            for later in range(axis + 1, len(placements)):
                if _sharded_dim(placements[later]) == placement.dim:
                    behind *= mesh_shape[later]
            if placement.split_factor != behind:
                raise RuntimeError(
                    f"placements {placements} on a mesh {mesh_shape} leave scattered rows: the "
                    f"split factor of axis {axis} is {placement.split_factor}, the axes behind it "
                    f"make {behind}"
                )
    sharded = [axis for axis, placement in enumerate(placements) if _is_sharded(placement)]
    strided = [axis for axis in sharded if isinstance(placements[axis], _StridedShard)]
    return [axis for axis in sharded if axis not in strided] + strided[::-1]


def _is_sharded(placement: Placement) -> bool:
    if isinstance(placement, Replicate):
        return False
    if _sharded_dim(placement) is None:
        raise RuntimeError(f"placement {placement} is neither a shard nor a replica")
    return True


def _sharded_dim(placement: Placement) -> int | None:
    # _StridedShard is not a subclass of Shard.
    return placement.dim if isinstance(placement, (Shard, _StridedShard)) else None


def chunk_of(size: int, num_chunks: int, index: int) -> tuple[int, int]:
    """Return start and length of chunk `index`, as `torch.chunk` cuts; late chunks may be empty."""
    full = -(-size // num_chunks)
    start = min(size, index * full)
    return start, min(size, start + full) - start
