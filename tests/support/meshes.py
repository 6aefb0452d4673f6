"""Meshes of one real rank, and of imagined ones, for tests that need no other."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer.config.parallel import ParallelConfig
from trainer.parallel.mesh import build_mesh


@contextmanager
def one_rank_mesh() -> Iterator[DeviceMesh]:
    """Yield the mesh of a fresh one-rank gloo group; the group ends with the context."""
    mesh = build_mesh(ParallelConfig(), "cpu")
    try:
        yield mesh
    finally:
        dist.destroy_process_group()


@contextmanager
def two_by_two_mesh() -> Iterator[DeviceMesh]:
    """Yield axes `a` and `b` of two imagined ranks each, this one at place (1, 0)."""
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    try:
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    finally:
        dist.destroy_process_group()


def ones_on(mesh: DeviceMesh, *placements: Placement) -> DTensor:
    """Return a DTensor whose local shard is a 2 x 4 matrix of ones."""
    return DTensor.from_local(torch.ones(2, 4), mesh, placements, run_check=False)
