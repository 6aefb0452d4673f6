"""Where a parameter's matrices lie: whole on every rank, whole in a split stack, or cut themselves.

Owns the rule of which placements can be orthogonalized (whole matrices only; what is not
supported is refused by name) and the local sizes of uneven shards. Knows nothing of costs,
buckets or owners: see `plan.py`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from trainer.errors import UserError
from trainer.optim.spec import AxisPlacement, ParameterSpec
from trainer.parallel.boxes import chunk_of


@dataclass(frozen=True)
class Layout:
    """A parameter seen as matrices.

    Attributes:
        kind: "whole": every rank holds every matrix; "stack": a rank holds some matrices, each
            whole; "matrix": each matrix is cut over `split_axis`.
        rows: Rows of one matrix, global (M).
        cols: Columns of one matrix, global (N).
        num_matrices: Matrices, or slabs of matrices, on this rank.
        max_matrices: The same on the rank that holds most.
        replica_axes: Mesh axes of more than one rank that hold the same values.
        split_axis: The mesh axis that cuts the matrices, if any.
        split_dim: 0: the axis cuts rows; 1: it cuts columns.
        slab_bounds: For each rank of `split_axis`, first row (column) and one past the last, in
            the order in which slabs are joined.
        is_strided: The slabs joined are a permutation of the matrix's rows (columns), which
            commutes with orthogonalization but hides which rows a slab holds.
    """

    kind: Literal["whole", "stack", "matrix"]
    rows: int
    cols: int
    num_matrices: int
    max_matrices: int
    replica_axes: tuple[int, ...] = ()
    split_axis: int | None = None
    split_dim: Literal[0, 1] = 0
    slab_bounds: tuple[tuple[int, int], ...] = ()
    is_strided: bool = False


def lay_out(spec: ParameterSpec, *, flatten: bool) -> Layout:
    """Decide how the matrices of a parameter lie.

    Args:
        spec: A parameter of at least two dims.
        flatten: A parameter of three or more dims is one matrix, its first dim against all
            others; False: it is a stack of matrices over its last two dims.

    Raises:
        UserError: more than one mesh axis cuts the matrices themselves.
    """
    is_flattened = flatten and len(spec.shape) > 2
    num_stack_dims = 0 if is_flattened else len(spec.shape) - 2
    rows = spec.shape[num_stack_dims]
    cols = math.prod(spec.shape[num_stack_dims + 1 :])
    sizes = spec.mesh.sizes if spec.mesh else ()
    shards = [(a, p) for a, p in enumerate(spec.placements) if p.dim is not None and sizes[a] > 1]
    cutting = [(a, p) for a, p in shards if p.dim is not None and p.dim >= num_stack_dims]
    replicas = tuple(a for a, p in enumerate(spec.placements) if p.dim is None and sizes[a] > 1)
    if len(cutting) > 1:
        raise UserError(_refusal(spec, [a for a, _ in cutting]))
    num_matrices, max_matrices = _count_matrices(spec, num_stack_dims)
    if not cutting:
        kind = "stack" if shards else "whole"
        return Layout(kind, rows, cols, num_matrices, max_matrices, replicas)
    axis, placement = cutting[0]
    assert placement.dim is not None
    return Layout(
        "matrix",
        rows,
        cols,
        num_matrices,
        max_matrices,
        replicas,
        split_axis=axis,
        split_dim=0 if placement.dim == num_stack_dims else 1,
        slab_bounds=_slab_bounds(spec, axis, placement, num_stack_dims, cols),
        is_strided=placement.split_factor > 1,
    )


@lru_cache(maxsize=4096)
def local_indices(size: int, shards: tuple[tuple[int, int, int], ...]) -> tuple[int, ...]:
    """Return the global indices along one dim that a rank holds, as DTensor deals them.

    Args:
        size: Global size of the dim.
        shards: For each mesh axis that splits this dim, outermost first: the axis size, the
            rank's coordinate on it and the split factor (1: plain `Shard`).
    """
    indices = list(range(size))
    for axis_size, coordinate, split_factor in shards:
        pieces = [_chunk(indices, split_factor, i) for i in range(split_factor)]
        indices = [i for piece in pieces for i in _chunk(piece, axis_size, coordinate)]
    return tuple(indices)


def local_shape(spec: ParameterSpec, coordinate: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Return the shape of the shard at a mesh coordinate (this rank's if None)."""
    return tuple(
        _local_length(size, _shards_of(spec, dim, coordinate))
        for dim, size in enumerate(spec.shape)
    )


def local_slices(spec: ParameterSpec) -> list[tuple[int, ...]]:
    """Return, for each dim, the global indices that this rank holds."""
    return [local_indices(s, _shards_of(spec, d, None)) for d, s in enumerate(spec.shape)]


def _shards_of(
    spec: ParameterSpec, dim: int, coordinate: tuple[int, ...] | None
) -> tuple[tuple[int, int, int], ...]:
    if spec.mesh is None:
        return ()
    coordinate = spec.mesh.coordinate if coordinate is None else coordinate
    return tuple(
        (spec.mesh.sizes[axis], coordinate[axis], placement.split_factor)
        for axis, placement in enumerate(spec.placements)
        if placement.dim == dim
    )


def _local_length(size: int, shards: Iterable[tuple[int, int, int]]) -> int:
    """Return how many indices `local_indices` would return."""
    for axis_size, coordinate, split_factor in shards:
        pieces = [chunk_of(size, split_factor, i)[1] for i in range(split_factor)]
        size = sum(chunk_of(piece, axis_size, coordinate)[1] for piece in pieces)
    return size


def _chunk(indices: list[int], num_chunks: int, index: int) -> list[int]:
    start, length = chunk_of(len(indices), num_chunks, index)
    return indices[start : start + length]


def _count_matrices(spec: ParameterSpec, num_stack_dims: int) -> tuple[int, int]:
    if spec.mesh is None:
        count = math.prod(spec.shape[:num_stack_dims])
        return count, count
    # Every step of dealing gives the first coordinate at least as much as any other.
    fullest = local_shape(spec, (0,) * len(spec.mesh.sizes))
    return (
        math.prod(local_shape(spec)[:num_stack_dims]),
        math.prod(fullest[:num_stack_dims]),
    )


def _slab_bounds(
    spec: ParameterSpec, axis: int, placement: AxisPlacement, num_stack_dims: int, cols: int
) -> tuple[tuple[int, int], ...]:
    assert spec.mesh is not None
    assert placement.dim is not None
    size = spec.shape[placement.dim]
    # Elements of the matrix's row (column) dim for one index of the tensor dim: above 1 only when
    # several tensor dims are flattened into the columns.
    unit = 1 if placement.dim == num_stack_dims else cols // size if size else 1
    bounds, stop = [], 0
    for coordinate in range(spec.mesh.sizes[axis]):
        shard = (spec.mesh.sizes[axis], coordinate, placement.split_factor)
        start, stop = stop, stop + unit * _local_length(size, (shard,))
        bounds.append((start, stop))
    return tuple(bounds)


def _refusal(spec: ParameterSpec, axes: list[int]) -> str:
    assert spec.mesh is not None
    names = " and ".join(f"{spec.mesh.axes[a]} ({spec.mesh.sizes[a]} ranks)" for a in axes)
    placements = ", ".join(
        "Replicate()"
        if p.dim is None
        else f"Shard({p.dim})"
        if p.split_factor == 1
        else f"_StridedShard({p.dim}, split_factor={p.split_factor})"
        for p in spec.placements
    )
    return (
        f"parameter {spec.name} of shape {list(spec.shape)} with placements ({placements}) has its "
        f"matrices cut by {names}: Muon orthogonalizes whole matrices and rebuilds them over one "
        "axis only; shard it over one axis or over its stack dims, or put it in the adamw group"
    )
