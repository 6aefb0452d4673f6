import pytest
import torch

from tests.support.qwen3_moe import qwen3_30b_a3b
from trainer.config.optim import MuonConfig
from trainer.errors import UserError
from trainer.optim.options import MuonOptions, plan_with_kernels
from trainer.optim.pricing import Price, price_plan
from trainer.optim.rates import predict_ms
from trainer.optim.setup import plan_groups

CPU = torch.device("cpu")


def price(rank=0, replicate="share", **sizes) -> Price:
    groups = plan_groups(MuonConfig(), qwen3_30b_a3b(rank, num_layers=4, **sizes))
    plan, kernels = plan_with_kernels(groups, MuonOptions(replicate=replicate), CPU)
    return price_plan(plan, groups, kernels)


def total_flops(world_size, **sizes) -> int:
    return sum(price(rank, **sizes).flops for rank in range(world_size))


def test_flops_of_a_rank_halve_when_two_replicas_share() -> None:
    alone = price(dp_shard=4, ep=4).flops
    assert price(dp_shard=4, ep=4, dp_replicate=2).flops == pytest.approx(alone / 2, rel=0.02)
    repeated = price(dp_shard=4, ep=4, dp_replicate=2, replicate="repeat").flops
    assert repeated == alone


def test_the_whole_job_does_the_work_of_one_process() -> None:
    assert total_flops(8, dp_shard=4, ep=2, dp_replicate=2) == price(dp_shard=1, ep=1).flops


def test_ranks_share_the_work_evenly() -> None:
    flops = [price(rank).flops for rank in range(8)]
    assert max(flops) < 1.1 * min(flops)


def test_only_dense_matrices_travel_with_local_experts() -> None:
    sent = price().sent_bytes
    assert set(sent) == {"dp_shard"}
    dense = 4 * (2 * 4096 * 2048 + 2 * 512 * 2048 + 128 * 2048)
    # In and out, in bfloat16, 7/8 of what this rank holds and owns.
    assert sent["dp_shard"] == pytest.approx(2 * 2 * dense / 8 * 7 / 8, rel=0.1)


def test_temporaries_stay_near_the_cap() -> None:
    assert price().temporary_bytes < 8 * 2**30


def test_a_price_predicts_times_on_a_known_gpu_only() -> None:
    times = predict_ms(price(), "H200")
    assert 0 < times["newton_schulz_ms"] < times["total_ms"]
    with pytest.raises(UserError, match="gpu='T4'"):
        predict_ms(price(), "T4")
