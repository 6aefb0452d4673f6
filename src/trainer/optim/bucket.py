"""Buckets and chunks: matrices that are exchanged and orthogonalized together, as plain data.

Owns the arithmetic of who owns how much of a chunk. How buckets come about is `bucketing.py`'s.
"""

import math
from dataclasses import dataclass
from typing import Literal

from trainer.optim.spec import MeshSpec

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes an element, by dtype name."""


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
