"""Which rank orthogonalizes what, and when: plain frozen data, built once from descriptions.

Owns bucketing, cutting into chunks, the dealing of matrices to owners and the order of chunks.
Needs no tensor, no process group and no collective, so that a plan for 512 ranks can be made
anywhere. Prices are in `pricing.py`, the printed table in `table.py`; `pipeline.py` carries a plan
out.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

from trainer.errors import UserError
from trainer.optim.layout import Layout, lay_out
from trainer.optim.spec import AxisPlacement, MeshSpec, ParameterSpec

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes an element, by dtype name."""

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


@dataclass(frozen=True)
class Piece:
    """A parameter's part in a bucket: all its matrices, or one half (gate or up) of each.

    Attributes:
        parameter: Index of the parameter, counted over all groups in order.
        local_rows: First row and one past the last, of each local matrix or slab.
        num_matrices: Matrices (or slabs) on this rank.
        max_matrices: The same on the rank that holds most.
    """

    parameter: int
    local_rows: tuple[int, int]
    num_matrices: int
    max_matrices: int


@dataclass(frozen=True)
class Chunk:
    """Consecutive matrices of a bucket that move and are orthogonalized together.

    Attributes:
        start: First matrix, counted over the bucket's pieces on this rank.
        stop: One past the last.
        owned: Matrices that each owner orthogonalizes, owners ordered by replica, then by shard;
            owners take consecutive matrices in that order.
    """

    start: int
    stop: int
    owned: tuple[int, ...]


@dataclass(frozen=True)
class Segment:
    """Consecutive matrices of one piece: those from `start` to `stop` of its parameter."""

    piece: Piece
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Matrices of one shape, dtype, placement and mesh, of one param group.

    Attributes:
        group: Index of the param group.
        layout: "whole", "stack" or "matrix" as in `layout.Layout`.
        rows: Rows of a matrix, global (M).
        cols: Columns, global (N).
        dtype: The parameters' dtype.
        mesh: The mesh; None for plain tensors.
        replica_axes: Axes over which owners share the work; empty with `replicate = "repeat"`.
        num_replicas: Ranks along `replica_axes`.
        replica_rank: This rank's place among them.
        split_axis: The axis that cuts each matrix, if any.
        split_dim: 0: into rows; 1: into columns.
        slab_sizes: Rows (columns) of each slab along `split_axis`.
        shard_rank: This rank's place on `split_axis`.
        lr_scale: The update's factor s.
        kernel: The Newton-Schulz kernel.
        kernel_reason: Why that one.
        pieces: The parameters.
        chunks: The same number on every rank, possibly empty here.
    """

    group: int
    layout: Literal["whole", "stack", "matrix"]
    rows: int
    cols: int
    dtype: str
    mesh: MeshSpec | None
    replica_axes: tuple[int, ...]
    num_replicas: int
    replica_rank: int
    split_axis: int | None
    split_dim: Literal[0, 1]
    slab_sizes: tuple[int, ...]
    shard_rank: int
    lr_scale: float
    kernel: str
    kernel_reason: str
    pieces: tuple[Piece, ...]
    chunks: tuple[Chunk, ...]

    @property
    def num_shards(self) -> int:
        """Ranks that each hold a slab of every matrix; 1: matrices are whole."""
        return max(1, len(self.slab_sizes))

    @property
    def local_matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of a matrix as held here: (M, N), or a slab's."""
        if self.split_axis is None:
            return self.rows, self.cols
        slab = self.slab_sizes[self.shard_rank]
        return (slab, self.cols) if self.split_dim == 0 else (self.rows, slab)

    @property
    def is_exchanged(self) -> bool:
        """Whether any of its bytes cross ranks."""
        return self.num_shards > 1 or self.num_replicas > 1

    def owned_by_replica(self, chunk: Chunk, replica: int) -> tuple[int, ...]:
        """Return the matrices that each shard rank of a replica orthogonalizes."""
        return chunk.owned[replica * self.num_shards : (replica + 1) * self.num_shards]

    def share(self, chunk: Chunk, replica: int) -> int:
        """Return how many matrices of a chunk a replica orthogonalizes."""
        return sum(self.owned_by_replica(chunk, replica))

    def segments(self, start: int, stop: int) -> list[Segment]:
        """Return the parameters' matrices that make up matrices [start, stop) of the bucket."""
        found, first = [], 0
        for piece in self.pieces:
            inside = max(start - first, 0), min(stop - first, piece.num_matrices)
            if inside[0] < inside[1]:
                found.append(Segment(piece, *inside))
            first += piece.num_matrices
        return found

    def num_collectives(self, chunk: Chunk) -> int:
        """Return the collectives of a chunk that this rank joins."""
        exchanges = self.num_shards > 1 and self.share(chunk, self.replica_rank) > 0
        is_shared = self.num_replicas > 1 and chunk.stop > chunk.start
        return 2 * exchanges + (is_shared and math.prod(self.local_matrix_shape) > 0)

    def owned_here(self, chunk: Chunk) -> int:
        """Return how many matrices of a chunk this rank orthogonalizes."""
        return chunk.owned[self.replica_rank * self.num_shards + self.shard_rank]


@dataclass(frozen=True)
class Route:
    """A parameter's line in the routing table."""

    parameter: str
    shape: tuple[int, ...]
    dtype: str
    group: str
    algorithm: str
    lr_scale: float
    layout: str
    kernel: str
    kernel_reason: str


@dataclass(frozen=True)
class Plan:
    """Everything the step follows on one rank.

    Attributes:
        options: The settings it was made with.
        routes: One line for each parameter, in the order in which pieces count them.
        buckets: What is orthogonalized together.
        slots: (bucket, chunk) in the order of execution, the same on every rank.
    """

    options: PlanOptions
    routes: tuple[Route, ...]
    buckets: tuple[Bucket, ...]
    slots: tuple[tuple[int, int], ...]

    def num_collectives(self) -> int:
        """Return the exchanges this rank joins in a step: in, out, and sharing with replicas.

        The all-reduce that agrees on missing gradients (one for each mesh's set of ranks, see
        `presence.py`) comes on top.
        """
        return sum(b.num_collectives(chunk) for b in self.buckets for chunk in b.chunks)

    def to_json(self) -> str:
        """Return the plan as a JSON object."""
        return json.dumps(self.as_dict(), indent=1)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain dicts and lists."""
        return {**asdict(self), "num_collectives": self.num_collectives()}


def build_plan(
    groups: Sequence[PlannedGroup], options: PlanOptions, choose_kernel: ChooseKernel
) -> Plan:
    """Plan the step of one rank.

    Ranks that describe the same parameters get plans that fit together: the same buckets and slots
    in the same order, and for each exchange the same counts on all ranks that take part.

    Args:
        groups: The param groups, in order.
        options: Settings that shape the plan.
        choose_kernel: Called once for each bucket with the largest stack a rank orthogonalizes.

    Raises:
        UserError: a parameter cannot be orthogonalized as it lies.
    """
    drafts = _draft_buckets(groups, options)
    loads: dict[tuple[Any, ...], list[int]] = {}
    buckets = []
    for key, pieces in drafts.items():
        buckets.append(_finish_bucket(key, tuple(pieces), options, choose_kernel, loads))
    return Plan(options, _routes(groups, buckets), tuple(buckets), _order_slots(buckets))


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
    index = 0
    for g, group in enumerate(groups):
        for spec in group.parameters:
            if group.algorithm == "muon" and math.prod(spec.shape) > 0:
                for key, piece in _pieces(g, group, spec, index, options):
                    drafts.setdefault(key, []).append(piece)
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
    matrix_bytes = key.rows * key.cols * BYTES[options.ns_dtype]
    cap = max(1, int(options.max_stack_gib * 2**30) // matrix_bytes)
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


def _deal(count: int, load: list[int], cost: int) -> tuple[int, ...]:
    """Deal matrices to owners evenly, leftovers to the least loaded; add the cost to `load`."""
    each, left = divmod(count, len(load))
    lightest = sorted(range(len(load)), key=lambda owner: (load[owner], owner))[:left]
    owned = [each + (owner in lightest) for owner in range(len(load))]
    for owner, matrices in enumerate(owned):
        load[owner] += matrices * cost
    return tuple(owned)


def _order_slots(buckets: Sequence[Bucket]) -> tuple[tuple[int, int], ...]:
    """Spread exchanged chunks evenly among local ones, whose work hides the exchange."""
    exchanged, local = [], []
    for b, bucket in enumerate(buckets):
        slots = exchanged if bucket.is_exchanged else local
        slots.extend((b, c) for c in range(len(bucket.chunks)))
    placed = [(i / len(exchanged), 0, slot) for i, slot in enumerate(exchanged)]
    placed += [((i + 0.5) / len(local), 1, slot) for i, slot in enumerate(local)]
    return tuple(slot for _, _, slot in sorted(placed))


def _routes(groups: Sequence[PlannedGroup], buckets: Sequence[Bucket]) -> tuple[Route, ...]:
    by_parameter = {piece.parameter: b for b in buckets for piece in b.pieces}
    specs = [(group, spec) for group in groups for spec in group.parameters]
    return tuple(
        _route(group, spec, by_parameter.get(index)) for index, (group, spec) in enumerate(specs)
    )


def _route(group: PlannedGroup, spec: ParameterSpec, bucket: Bucket | None) -> Route:
    if bucket is None:
        return Route(
            spec.name,
            spec.shape,
            spec.dtype,
            group.name,
            group.algorithm,
            1.0,
            "elementwise",
            "",
            "",
        )
    return Route(
        spec.name,
        spec.shape,
        spec.dtype,
        group.name,
        group.algorithm,
        bucket.lr_scale,
        _layout_text(bucket, spec),
        bucket.kernel,
        bucket.kernel_reason,
    )


def _layout_text(bucket: Bucket, spec: ParameterSpec) -> str:
    axes = bucket.mesh.axes if bucket.mesh else ()
    sizes = bucket.mesh.sizes if bucket.mesh else ()
    over = [axes[a] for a, p in enumerate(spec.placements) if p.dim is not None and sizes[a] > 1]
    match bucket.layout:
        case "whole":
            text = "whole"
        case "stack":
            text = f"stack split over {' x '.join(over)}"
        case "matrix":
            assert bucket.split_axis is not None
            cut = ("rows", "columns")[bucket.split_dim]
            text = f"{cut} cut over {axes[bucket.split_axis]}"
            stacked = [name for name in over if name != axes[bucket.split_axis]]
            text += f", stack split over {' x '.join(stacked)}" if stacked else ""
    if bucket.replica_axes:
        text += f", shared over {' x '.join(axes[a] for a in bucket.replica_axes)}"
    return text
