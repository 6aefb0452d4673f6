"""On every split of the ranks a model gives the loss, gradients and norm of a single process."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.meshes import one_rank_mesh
from tests.support.networks import dense_architecture, moe_architecture, packed_batch, random_model
from tests.support.spawn import run_ranks
from trainer.config.model import ModelConfig
from trainer.config.parallel import ParallelConfig
from trainer.model import TokenOutputs, setup_model
from trainer.parallel.boxes import local_box, local_part
from trainer.parallel.clip import clip_gradients_
from trainer.parallel.mesh import build_mesh

pytestmark = pytest.mark.distributed

LENGTHS = [[5, 7], [12], [3, 4, 5], [6, 6]]
LOAD_BALANCING_COEF = 0.1

MODELS = {
    "moe": random_model(moe_architecture()),
    "moe-uneven-experts": random_model(moe_architecture(num_experts=6)),
    "moe-more-shards-than-experts": random_model(
        moe_architecture(num_experts=2, num_experts_per_tok=1)
    ),
    "moe-empty-shards": random_model(
        # dim 1 of the stacks is 36 and 34: neither 4 shards nor 3 experts a rank split evenly.
        moe_architecture(num_experts=3, hidden_size=34, moe_intermediate_size=17)
    ),
    "moe-idle-experts": random_model(moe_architecture(num_experts=8, num_experts_per_tok=1)),
    "moe-tied-recomputed": random_model(
        moe_architecture(tie_word_embeddings=True), activation_checkpointing=True
    ),
    "moe-bf16": random_model(moe_architecture(), compute_dtype="bfloat16"),
    "dense": random_model(dense_architecture()),
}
# fp32: sums in another order. bf16: each rank rounds its part of a gradient to 8 bits.
TOLERANCE = dict.fromkeys(MODELS, 1e-5) | {"moe-bf16": 1.2e-2}
SPLITS = {
    2: [(1, 2, 1), (1, 2, 2), (2, 1, 1)],
    4: [(1, 4, 1), (1, 4, 2), (1, 4, 4), (2, 2, 1), (2, 2, 2), (4, 1, 1)],
}


@dataclass(frozen=True)
class Shard:
    """What one rank holds of a parameter after the backward."""

    slices: tuple[slice, ...]
    weight: np.ndarray
    gradient: np.ndarray


@dataclass(frozen=True)
class Outcome:
    """One rank's view of one forward and backward."""

    loss: float
    norm: float
    finite: bool
    shards: dict[str, Shard]


def fits(config: ModelConfig, ep: int) -> bool:
    num_experts = config.architecture.model_dump().get("num_experts", 0)
    return num_experts % ep == 0 and (ep == 1 or num_experts > 0)


def loss_of(outputs: TokenOutputs, targets: Tensor, num_trained: int) -> Tensor:
    trained_P = (targets != -100).sum(1)
    balance = (outputs.load_balancing_P * trained_P).sum()
    return (LOAD_BALANCING_COEF * balance - outputs.log_probs_PS.sum()) / num_trained


def run_once(model: nn.Module, rank: int, world_size: int) -> Outcome:
    """Run this rank's packs of the global batch; the last rank of four has no trained token."""
    inputs, positions, targets = packed_batch(LENGTHS)
    targets[3] = -100
    mine = slice(rank * 4 // world_size, (rank + 1) * 4 // world_size)
    num_trained = int((targets != -100).sum())
    loss = torch.zeros(())
    # Two micro-batches where there are packs enough: gradients accumulate.
    for packs in torch.arange(4)[mine].chunk(2):
        outputs = model(inputs[packs], position_ids=positions[packs], target_ids=targets[packs])
        part = loss_of(outputs, targets[packs], num_trained)
        part.backward()
        loss += part.detach()
    dist.all_reduce(loss)
    norm = clip_gradients_(model.parameters(), None)
    shards = {
        name: Shard(
            local_box(p).slices,
            local_part(p).numpy(),
            np.zeros(0) if p.grad is None else local_part(p.grad).numpy(),
        )
        for name, p in model.named_parameters()
    }
    return Outcome(loss.item(), norm.norm.item(), bool(norm.finite), shards)


def run_all_splits(world_size: int) -> dict[tuple[str, tuple[int, int, int]], Outcome]:
    outcomes = {}
    for split in SPLITS[world_size]:
        dp_replicate, dp_shard, ep = split
        config = ParallelConfig(dp_replicate=dp_replicate, dp_shard=dp_shard, ep=ep)
        mesh = build_mesh(config, "cpu")
        for name, model_config in MODELS.items():
            if fits(model_config, ep):
                model = setup_model(model_config, mesh, seed=3)
                outcomes[name, split] = run_once(model, dist.get_rank(), world_size)
    return outcomes


@pytest.fixture(scope="module")
def single() -> dict[str, Outcome]:
    with one_rank_mesh() as mesh:
        return {
            name: run_once(setup_model(config, mesh, seed=3), 0, 1)
            for name, config in MODELS.items()
        }


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_split_equals_a_single_process(single: dict[str, Outcome], world_size: int) -> None:
    by_rank = run_ranks(world_size, run_all_splits, world_size, timeout_s=200)
    assert {name for name, _ in by_rank[0]} == set(MODELS)
    for case in by_rank[0]:
        ranks = [outcomes[case] for outcomes in by_rank]
        check_equal(single[case[0]], ranks, case, TOLERANCE[case[0]])


def check_equal(whole: Outcome, ranks: list[Outcome], case: object, tolerance: float) -> None:
    for outcome in ranks:
        assert outcome.loss == pytest.approx(whole.loss, rel=tolerance), case
        assert outcome.norm == pytest.approx(whole.norm, rel=tolerance), case
        assert outcome.norm == ranks[0].norm, case
        assert outcome.finite
    for name, shard in whole.shards.items():
        num_holders = np.zeros(shard.weight.shape)
        for outcome in ranks:
            part = outcome.shards[name]
            assert np.array_equal(part.weight, shard.weight[part.slices]), (case, name)
            assert part.gradient.shape == part.weight.shape, (case, name)
            difference = np.linalg.norm(part.gradient - shard.gradient[part.slices])
            assert difference <= tolerance * np.linalg.norm(shard.gradient), (case, name)
            num_holders[part.slices] += 1
        assert num_holders.min() >= 1, (case, name)
