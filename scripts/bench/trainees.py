"""What train_step.py trains: our model through TrainStep, and transformers' own in a plain loop.

Both sit on the same FSDP2, take the same optimizer and see the same packs, each one document. Where
there are several ranks, each trains on its share of the packs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rank_model import build_model, fill_on_device_
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

from trainer.clock import Clock
from trainer.config.model import ModelConfig
from trainer.config.optim import MuonConfig
from trainer.config.parallel import ParallelConfig
from trainer.data.packing import Document, Pack, PackedBatch, collate
from trainer.model.architecture import resolve_architecture
from trainer.optim import Muon, setup_optimizer
from trainer.parallel.mesh import build_mesh, dense_mesh
from trainer.progress import Progress
from trainer.step import StepSettings, StepTotals, TrainStep

OPTIMIZER = MuonConfig(lr=2e-4, max_norm=1.0)
PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Trainee:
    """Something that trains.

    Attributes:
        step: Trains on the packs of one step; marks `start`, `backward` (when gradients are done)
            and `optimizer` (when the update is done).
        optimizer: Its optimizer.
    """

    step: Callable[[Clock], object]
    optimizer: Muon


@dataclass(frozen=True)
class Workload:
    """What a trainee trains on.

    Attributes:
        packs: Of the step, over all ranks.
        local_packs: Of this rank; as many on each.
        micro_batch_size: Packs a forward.
        ep: `parallel.ep`, for models that know it.
        device: Of this rank.
    """

    packs: Sequence[Pack]
    local_packs: Sequence[Pack]
    micro_batch_size: int
    ep: int
    device: torch.device

    def batches(self) -> list[PackedBatch]:
        """Return this rank's micro-batches, on its device."""
        packs, size = self.local_packs, self.micro_batch_size
        starts = range(0, len(packs), size)
        batches = [collate(packs[i : i + size], packs[0].num_tokens, 0) for i in starts]
        return [batch.to(self.device) for batch in batches]


def make_packs(num_packs: int, seq_len: int, vocab_size: int) -> list[Pack]:
    """Return packs of one document of random tokens, all trained."""
    generator = torch.Generator().manual_seed(0)
    packs = []
    for _ in range(num_packs):
        ids = torch.randint(vocab_size, (seq_len + 1,), generator=generator).numpy()
        weights = torch.ones(seq_len).numpy()
        packs.append(Pack((Document(ids[:-1], ids[1:], weights, 0),)))
    return packs


def ours(config: ModelConfig, workload: Workload) -> Trainee:
    """Return our model in our step.

    Collective: all ranks.
    """
    model, mesh = build_model(config, workload.ep, workload.device.type)
    optimizer = _muon(model, mesh)
    settings = StepSettings(load_balancing_coef=0.0, max_norm=1.0, max_skipped_steps=10)
    train_step = TrainStep(model, optimizer, lambda _: 1.0, settings, Progress())
    batches, totals = workload.batches(), StepTotals.of(workload.packs)

    def step(clock: Clock) -> object:
        clock.mark("start")
        return train_step(clock, batches, totals)

    return Trainee(step, optimizer)


def transformers_own(config: ModelConfig, workload: Workload) -> Trainee:
    """Return transformers' model, its experts by `grouped_mm`, in a plain FSDP2 loop.

    Collective: all ranks.
    """
    mesh = build_mesh(ParallelConfig(), workload.device.type)
    model = _shard_plainly(config, mesh, workload.device)
    optimizer = _muon(model, mesh)
    batches = workload.batches()

    def step(clock: Clock) -> object:
        clock.mark("start")
        for batch in batches:
            # It shifts labels itself. No mask, no positions: plain causal attention, its fastest.
            outputs = model(
                input_ids=batch.input_ids_PS, labels=batch.input_ids_PS, use_cache=False
            )
            (outputs.loss / len(batches)).backward()
        clock.mark("backward")
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.mark("optimizer")
        return None

    return Trainee(step, optimizer)


def _shard_plainly(config: ModelConfig, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    hf_config = resolve_architecture(config)
    assert isinstance(hf_config, Qwen3MoeConfig)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            hf_config, attn_implementation="sdpa", experts_implementation="grouped_mm"
        )
    if config.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    precision = torch.bfloat16 if config.compute_dtype == "bfloat16" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=dense_mesh(mesh), mp_policy=policy)
    fully_shard(model, mesh=dense_mesh(mesh), mp_policy=policy)
    model.to_empty(device=device)
    model.model.register_module("rotary_emb", Qwen3MoeRotaryEmbedding(hf_config).to(device))
    fill_on_device_(model, seed=0, std=hf_config.initializer_range)
    if config.compile:
        for layer in model.model.layers:
            for name, module in layer.named_children():
                if name != "mlp":
                    module.compile()
    return model


def _muon(model: nn.Module, mesh: DeviceMesh) -> Muon:
    optimizer = setup_optimizer(OPTIMIZER, model.named_parameters(), mesh)
    assert isinstance(optimizer, Muon)
    return optimizer
