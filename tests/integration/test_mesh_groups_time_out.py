import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.support.spawn import run_ranks
from trainer.config.parallel import ParallelConfig
from trainer.parallel.mesh import build_mesh, dense_mesh, ep_mesh

pytestmark = pytest.mark.distributed

TIMEOUT_S = 2.0
PATIENCE_S = 100.0


def seconds_until_given_up(axis: str) -> float:
    """Wait on rank 0, in the group of an axis, for a rank that does not come there."""
    # The world's own group may be that of an axis too, with its limit.
    patient = dist.new_group(timeout=timedelta(seconds=PATIENCE_S))
    dist.barrier(patient)
    ep = 2 if axis == "ep" else 1
    mesh = build_mesh(ParallelConfig(ep=ep, timeout_s=TIMEOUT_S), "cpu")
    group = ep_mesh(mesh).get_group() if axis == "ep" else dense_mesh(mesh).get_group(axis)
    began = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed out|timeout"):
            dist.all_reduce(torch.ones(1), group=group)
    waited = time.monotonic() - began
    dist.barrier(patient)
    return waited


@pytest.mark.parametrize("axis", ["ep", "dp_shard"])
def test_a_collective_of_a_mesh_axis_ends_after_the_configured_time(axis: str) -> None:
    """Without a limit of ours it would be torch's half an hour."""
    seconds, _ = run_ranks(2, seconds_until_given_up, axis, timeout_s=PATIENCE_S)
    assert TIMEOUT_S * 0.9 < seconds < PATIENCE_S
