"""A mesh of one rank for tests that need no other."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

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
