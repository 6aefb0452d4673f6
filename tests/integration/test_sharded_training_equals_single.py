"""Invariant 1: the same numbers however a run is sharded, for every optimizer, over ten steps."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.spawn import run_ranks

NUM_STEPS = 10
SKIPPED_STEP = 6
SPLITS = {
    2: [dict(dp_shard=2), dict(dp_shard=2, ep=2), dict(dp_replicate=2, dp_shard=1)],
    4: [
        dict(dp_shard=4),
        dict(dp_shard=4, ep=2),
        dict(dp_shard=4, ep=4),
        dict(dp_replicate=2, dp_shard=2),
        dict(dp_replicate=2, dp_shard=2, ep=2),
        dict(dp_replicate=4, dp_shard=1),
    ],
}
OPTIMIZERS = {
    # SGD's update is the raw gradient: a wrong scale cannot hide.
    "sgd": dict(type="sgd", lr=0.5, max_norm=None),
    "sgd clipped": dict(type="sgd", lr=0.5, max_norm=0.1),
    "adamw": dict(type="adamw", lr=3e-3),
    # Newton-Schulz multiplies rounding noise in a gradient's weak directions by up to 500 (the
    # product of the rows' a): at ten times this lr the router's weights leave 1e-5 for that alone.
    "muon": dict(type="muon", lr=0.004, adamw_lr=3e-3, ns_dtype="float32"),
}


def make_steps():
    """Packs of ten steps: ragged documents, row weights, and a rank's worth all masked at times."""
    from trainer.data import Document, Pack
    from trainer.data.packing import Sample

    generator = np.random.default_rng(0)

    def document(num_tokens, is_masked):
        ids = generator.integers(0, 64, num_tokens)
        weights = (generator.random(num_tokens) < 0.7).astype(np.float32) * (not is_masked)
        return Document.from_sample(Sample(ids, weights * generator.choice([1.0, 2.0])))

    def pack(is_masked=False):
        return Pack(tuple(document(n, is_masked) for n in generator.integers(2, 11, 2)))

    # Pack i of 8 goes to rank i mod world size: masking 1 and 5 masks all of rank 1 of 4.
    steps = [[pack(step in (2, 3) and i in (1, 5)) for i in range(8)] for step in range(NUM_STEPS)]
    poisoned = steps[SKIPPED_STEP][3].documents[0]
    weights = np.where(poisoned.targets >= 0, np.inf, 0).astype(np.float32)
    bad = replace(poisoned, weights=weights)
    steps[SKIPPED_STEP][3] = Pack((bad, *steps[SKIPPED_STEP][3].documents[1:]))
    return steps


def train_all(splits, num_threads=1):
    """Train every split with every optimizer; return what each did, whole weights on rank 0."""
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(True)
    return {
        (str(split), name): train(split, optim)
        for split in splits
        for name, optim in OPTIMIZERS.items()
    }


def train(split, optim):
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from trainer.clock import Clock
    from trainer.config import SFTConfig
    from trainer.data import micro_batches
    from trainer.model import setup_model
    from trainer.optim import setup_optimizer
    from trainer.parallel import build_mesh
    from trainer.progress import Progress
    from trainer.schedule import build_schedule
    from trainer.step import StepSettings, StepTotals, TrainStep

    config = SFTConfig(
        output_dir="unused",
        max_steps=NUM_STEPS,
        model=dict(
            weights="random",
            compute_dtype="float32",
            architecture=dict(
                type="qwen3_moe",
                vocab_size=64,
                hidden_size=16,
                intermediate_size=24,
                moe_intermediate_size=12,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=8,
                num_experts=8,
                num_experts_per_tok=2,
            ),
        ),
        parallel=dict(split),
        optim=dict(optim),
        data=dict(source=dict(type="files", path="unused"), seq_len=24),
    )
    device = torch.device("cpu")
    mesh = build_mesh(config.parallel, "cpu")
    model = setup_model(config.model, mesh, seed=1)
    optimizer = setup_optimizer(config.optim, model.named_parameters(), mesh)
    step = TrainStep(
        model,
        optimizer,
        build_schedule(config.scheduler, NUM_STEPS),
        StepSettings(load_balancing_coef=0.1, max_norm=config.optim.max_norm, max_skipped_steps=3),
        Progress(),
    )
    records = []
    for packs in make_steps():
        batches = micro_batches(
            packs,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            micro_batch_size=2,
            seq_len=24,
            pad_id=0,
        )
        clock = Clock(device)
        clock.mark("start")
        records.append(step(clock, batches, StepTotals.of(packs)))
    step.settle()
    values = torch.stack([record.values.read() for record in records])
    weights = {}
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if dist.get_rank() == 0:
            weights[name] = whole.detach().numpy().astype(np.float64)
    return values.numpy(), weights, step.progress


@pytest.fixture(scope="module")
def single():
    return run_ranks(1, train_all, [{}])[0]


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_split_gives_the_numbers_of_one_process(world_size, single):
    results = run_ranks(world_size, train_all, SPLITS[world_size], timeout_s=240)[0]
    assert len(results) == len(SPLITS[world_size]) * len(OPTIMIZERS)
    for (split, name), (values, weights, progress) in results.items():
        expected_values, expected_weights, expected_progress = single[str({}), name]
        case = f"{name} on {split}"
        finite = np.arange(NUM_STEPS) != SKIPPED_STEP
        # Sums of fp32 associate otherwise on other splits; 1e-5 is the design's bound.
        np.testing.assert_allclose(
            values[finite], expected_values[finite], rtol=1e-5, atol=1e-7, err_msg=case
        )
        assert progress == expected_progress, case
        assert (progress.num_skipped, progress.num_applied) == (1, NUM_STEPS - 1), case
        for parameter, expected in expected_weights.items():
            error = np.linalg.norm(weights[parameter] - expected) / np.linalg.norm(expected)
            assert error < 1e-5, f"{case}: {parameter} differs by {error:.1e}"


@pytest.mark.distributed
def test_training_moves_the_weights_of_every_parameter(single):
    _, adamw, _ = single[str({}), "adamw"]
    _, muon, _ = single[str({}), "muon"]
    same = [name for name in adamw if np.array_equal(adamw[name], muon[name])]
    assert not same
