"""Ten training steps of a tiny network through the real model, optimizer and step.

Owns the steps (ragged, weighted, partly masked, one of them poisoned) and training them on any
split and device. What the results must equal is the tests'.
"""

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trainer.clock import Clock
from trainer.config import SFTConfig
from trainer.data import Document, Pack, micro_batches
from trainer.data.packing import Sample
from trainer.model import setup_model
from trainer.optim import setup_optimizer
from trainer.parallel import build_mesh
from trainer.progress import Progress
from trainer.schedule import build_schedule
from trainer.step import StepSettings, StepTotals, TrainStep

NUM_STEPS = 10
SKIPPED_STEP = 6
SEQ_LEN = 24

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


def train_all(splits, device_type="cpu", **model):
    """Train every split with every optimizer; return what each did, whole weights on rank 0."""
    torch.use_deterministic_algorithms(device_type == "cpu")
    return {
        (str(split), name): train(split, optim, device_type, **model)
        for split in splits
        for name, optim in OPTIMIZERS.items()
    }


def train(split, optim, device_type="cpu", **model):
    """Return what each step measured, the final weights (rank 0) and the counters."""
    config = SFTConfig(
        output_dir="unused",
        max_steps=NUM_STEPS,
        model=dict(
            weights="random",
            **({"compute_dtype": "float32"} | model),
            architecture=dict(
                type="qwen3_moe",
                vocab_size=64,
                hidden_size=16,
                intermediate_size=24,
                moe_intermediate_size=12,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=16,
                num_experts=8,
                num_experts_per_tok=2,
            ),
        ),
        parallel=dict(split),
        optim=dict(optim),
        data=dict(source=dict(type="files", path="unused"), seq_len=SEQ_LEN),
    )
    device = torch.device(device_type)
    mesh = build_mesh(config.parallel, device_type)
    network = setup_model(config.model, mesh, seed=1)
    optimizer = setup_optimizer(config.optim, network.named_parameters(), mesh)
    step = TrainStep(
        network,
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
            seq_len=SEQ_LEN,
            pad_id=0,
        )
        batches = [batch.to(device) for batch in batches]
        clock = Clock(device)
        clock.mark("start")
        records.append(step(clock, batches, StepTotals.of(packs)))
    step.settle()
    values = torch.stack([record.values.read() for record in records])
    weights = {}
    for name, parameter in network.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if dist.get_rank() == 0:
            weights[name] = whole.detach().cpu().numpy().astype(np.float64)
    return values.numpy(), weights, step.progress
