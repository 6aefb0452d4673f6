"""From param groups to buckets: what belongs together, cut into chunks, dealt to owners.

Owns the rules. Buckets themselves are in `bucket.py`, their order and the whole plan in `plan.py`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from trainer.errors import UserError
from trainer.optim.bucket import BYTES, Bucket, Chunk, Piece
from trainer.optim.layout import Layout, lay_out
from trainer.optim.spec import AxisPlacement, MeshSpec, ParameterSpec

ChooseKernel = Callable[[tuple[int, int, int]], tuple[str, str]]
"""From a stack's shape (B, M, N): the kernel's name and why it was chosen."""


@dataclass(frozen=True)
class PlanOptions:
    """Settings of the plan; fields are those of `[optim]`."""

    ns_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    replicate: Literal["share", "repeat"] = "share"
    max_stack_gib: float = 2.0
    split_gate_up: bool = False


@dataclass(frozen=True)
class PlannedGroup:
    """One param group: its members and the settings that shape the plan."""

    name: str
    algorithm: Literal["muon", "adamw"]
    parameters: tuple[ParameterSpec, ...]
    flatten: bool = False
    adjust_lr: Literal["rms_norm", "spectral_norm"] | None = "rms_norm"


def make_buckets(
    groups: Sequence[PlannedGroup], options: PlanOptions, choose_kernel: ChooseKernel
) -> list[Bucket]:
    """Return the buckets of one rank, in the order that all ranks have.

    Raises:
        UserError: a parameter cannot be orthogonalized as it lies.
    """
    drafts = _draft_buckets(groups, options)
    loads: dict[tuple[Any, ...], list[int]] = {}
    return [
        _finish_bucket(key, tuple(pieces), options, choose_kernel, loads)
        for key, pieces in drafts.items()
    ]


def lr_scale(rows: int, cols: int, adjust_lr: str | None) -> float:
    """Return the update's factor s for a matrix of global shape (rows, cols)."""
    match adjust_lr:
        case "rms_norm":
            return 0.2 * math.sqrt(max(rows, cols))
        case "spectral_norm":
            return math.sqrt(rows / cols)
        case None:
            return 1.0
    raise UserError(
        f"adjust_lr={adjust_lr!r}: choose 'rms_norm', 'spectral_norm', or leave it unset"
    )


@dataclass(frozen=True)
class _BucketKey:
    """What matrices of one bucket have in common."""

    group: int
    mesh: MeshSpec | None
    placements: tuple[AxisPlacement, ...]
    dtype: str
    num_dims: int
    layout: Literal["whole", "stack", "matrix"]
    rows: int
    cols: int
    replica_axes: tuple[int, ...]
    split_axis: int | None
    split_dim: Literal[0, 1]
    slab_sizes: tuple[int, ...]
    lr_scale: float


def _draft_buckets(
    groups: Sequence[PlannedGroup], options: PlanOptions
) -> dict[_BucketKey, list[Piece]]:
    drafts: dict[_BucketKey, list[Piece]] = {}
    # Layers are alike: what costs a pass over all ranks is done once for each kind of parameter.
    known: dict[tuple[Any, ...], list[tuple[_BucketKey, Piece]]] = {}
    index = 0
    for g, group in enumerate(groups):
        for spec in group.parameters:
            if group.algorithm == "muon" and math.prod(spec.shape) > 0:
                kind = g, is_gate_up(spec.name), replace(spec, name="")
                if kind not in known:
                    known[kind] = _pieces(g, group, spec, index, options)
                for key, piece in known[kind]:
                    drafts.setdefault(key, []).append(replace(piece, parameter=index))
            index += 1
    return drafts


def _pieces(
    g: int, group: PlannedGroup, spec: ParameterSpec, index: int, options: PlanOptions
) -> list[tuple[_BucketKey, Piece]]:
    layout = lay_out(spec, flatten=group.flatten)
    pieces = []
    for first, stop in _row_blocks(spec, layout, options):
        slab_sizes, local_rows = _cut_rows(spec, layout, first, stop)
        key = _BucketKey(
            group=g,
            mesh=spec.mesh,
            placements=spec.placements,
            dtype=spec.dtype,
            num_dims=len(spec.shape),
            layout=layout.kind,
            rows=stop - first,
            cols=layout.cols,
            replica_axes=layout.replica_axes if options.replicate == "share" else (),
            split_axis=layout.split_axis,
            split_dim=layout.split_dim,
            slab_sizes=slab_sizes,
            lr_scale=lr_scale(stop - first, layout.cols, group.adjust_lr),
        )
        piece = Piece(index, local_rows, layout.num_matrices, layout.max_matrices)
        pieces.append((key, piece))
    return pieces


def is_gate_up(name: str) -> bool:
    """Return whether a parameter is the fused gate and up projection of experts."""
    return name.endswith("experts.gate_up_proj")


def _row_blocks(spec: ParameterSpec, layout: Layout, options: PlanOptions) -> list[tuple[int, int]]:
    """Return the global row ranges that are orthogonalized each on their own."""
    if not (options.split_gate_up and is_gate_up(spec.name)):
        return [(0, layout.rows)]
    if layout.rows % 2 or (layout.is_strided and layout.split_dim == 0):
        raise UserError(
            f"optim.split_gate_up=true: the rows of {spec.name} {list(spec.shape)} do not part "
            "into gate and up where they lie; set optim.split_gate_up=false or shard another dim"
        )
    half = layout.rows // 2
    return [(0, half), (half, layout.rows)]


def _cut_rows(
    spec: ParameterSpec, layout: Layout, first: int, stop: int
) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Return each slab's size within global rows [first, stop), and this rank's local rows."""
    if layout.split_axis is None:
        return (), (first, stop)
    if layout.split_dim == 1:
        return tuple(end - start for start, end in layout.slab_bounds), (first, stop)
    assert spec.mesh is not None
    overlaps = [
        (min(max(start, first), stop), min(max(end, first), stop))
        for start, end in layout.slab_bounds
    ]
    here = spec.mesh.coordinate[layout.split_axis]
    origin = layout.slab_bounds[here][0]
    start, end = overlaps[here]
    local_rows = (start - origin, end - origin) if end > start else (0, 0)
    return tuple(end - start for start, end in overlaps), local_rows


def _finish_bucket(
    key: _BucketKey,
    pieces: tuple[Piece, ...],
    options: PlanOptions,
    choose_kernel: ChooseKernel,
    loads: dict[tuple[Any, ...], list[int]],
) -> Bucket:
    num_replicas, replica_rank = _place(key.mesh, key.replica_axes)
    _, shard_rank = _place(key.mesh, () if key.split_axis is None else (key.split_axis,))
    num_shards = max(1, len(key.slab_sizes))
    # Ranks that share a bucket share all buckets with this key, so they agree on the loads.
    load = loads.setdefault(
        (key.mesh, key.replica_axes, key.split_axis), [0] * (num_replicas * num_shards)
    )
    chunks = _cut_chunks(key, pieces, options, num_replicas, load)
    largest = max((max(chunk.owned) for chunk in chunks), default=0)
    kernel, reason = choose_kernel((max(1, largest), key.rows, key.cols))
    return Bucket(
        group=key.group,
        layout=key.layout,
        rows=key.rows,
        cols=key.cols,
        dtype=key.dtype,
        mesh=key.mesh,
        replica_axes=key.replica_axes,
        num_replicas=num_replicas,
        replica_rank=replica_rank,
        split_axis=key.split_axis,
        split_dim=key.split_dim,
        slab_sizes=key.slab_sizes,
        shard_rank=shard_rank,
        lr_scale=key.lr_scale,
        kernel=kernel,
        kernel_reason=reason,
        pieces=pieces,
        chunks=chunks,
    )


def _place(mesh: MeshSpec | None, axes: tuple[int, ...]) -> tuple[int, int]:
    """Return how many ranks some axes of a mesh span, and this rank's row-major place there."""
    size, rank = 1, 0
    if mesh is not None:
        for axis in axes:
            size, rank = size * mesh.sizes[axis], rank * mesh.sizes[axis] + mesh.coordinate[axis]
    return size, rank


def _cut_chunks(
    key: _BucketKey,
    pieces: tuple[Piece, ...],
    options: PlanOptions,
    num_replicas: int,
    load: list[int],
) -> tuple[Chunk, ...]:
    num_shards = max(1, len(key.slab_sizes))
    cap = max(1, int(options.max_stack_gib * 2**30) // _matrix_bytes(key, options.ns_dtype))
    # Both an owner's stack and the slabs a rank receives from all replicas stay under the cap; a
    # chunk still gives every owner a matrix.
    chunk_size = max(cap, num_replicas) * num_shards
    # From the fullest rank, so that all ranks cut into as many chunks and stay in step.
    num_chunks = max(1, -(-sum(piece.max_matrices for piece in pieces) // chunk_size))
    count = sum(piece.num_matrices for piece in pieces)
    bounds = [index * count // num_chunks for index in range(num_chunks + 1)]
    cost = key.rows * key.cols * min(key.rows, key.cols)
    return tuple(
        Chunk(start, stop, _deal(stop - start, load, cost)) for start, stop in pairwise(bounds)
    )


def _matrix_bytes(key: _BucketKey, ns_dtype: str) -> int:
    """Return what a matrix takes while it is orthogonalized: two copies of it and four squares.

    Four is what fused rows take (`iteration.py`); the standard iteration leaves two unused. With
    the default of 2 GiB a stack of 1536x2048 has 68 matrices: from 16 on, size gains nothing.
    """
    squares = 4 * min(key.rows, key.cols) ** 2
    return (2 * key.rows * key.cols + squares) * BYTES[ns_dtype]


def _deal(count: int, load: list[int], cost: int) -> tuple[int, ...]:
    """Deal matrices to owners evenly, leftovers to the least loaded; add the cost to `load`."""
    each, left = divmod(count, len(load))
    lightest = sorted(range(len(load)), key=lambda owner: (load[owner], owner))[:left]
    owned = [each + (owner in lightest) for owner in range(len(load))]
    for owner, matrices in enumerate(owned):
        load[owner] += matrices * cost
    return tuple(owned)
