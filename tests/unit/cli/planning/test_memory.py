import pytest
import torch

from tests.support.saved import saved_bytes
from tests.support.spawn import run_ranks
from trainer.cli.planning.memory import (
    GIB,
    Shape,
    activation_bytes,
    largest_micro_batch,
    step_memory,
)
from trainer.cli.planning.parameters import describe_rank, global_shapes, local_numel
from trainer.config.model import DenseArchitecture, ModelConfig, MoEArchitecture
from trainer.config.parallel import ParallelConfig
from trainer.model import setup_model
from trainer.model.architecture import inline_config
from trainer.parallel import build_mesh
from trainer.parallel.mesh import MeshSizes

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
CPU = ParallelConfig(device="cpu")
NUM_PACKS, SEQ_LEN = 2, 64


def shape_of(num_packs: int = NUM_PACKS, *, is_checkpointed: bool = False) -> Shape:
    return Shape(num_packs, SEQ_LEN, 2, 1024, is_checkpointed, keeps_gathered=False)


def kept(architecture: DenseArchitecture, *, is_checkpointed: bool) -> int:
    """Count what autograd keeps in a forward in bfloat16."""
    config = ModelConfig(
        architecture=architecture,
        weights="random",
        compute_dtype="bfloat16",
        activation_checkpointing=is_checkpointed,
    )
    model = setup_model(config, build_mesh(CPU, "cpu"))
    ids = torch.arange(NUM_PACKS * SEQ_LEN).view(NUM_PACKS, SEQ_LEN) % 64
    positions = torch.arange(SEQ_LEN).repeat(NUM_PACKS, 1)
    return saved_bytes(
        lambda: model(ids, position_ids=positions, target_ids=ids).log_probs_PS.sum(),
        exclude=[parameter.to_local() for parameter in model.parameters()],
    )


def architecture_of(kind: str, num_layers: int) -> DenseArchitecture:
    if kind == "qwen3":
        return DenseArchitecture(**SIZES, num_hidden_layers=num_layers)
    return MoEArchitecture(**SIZES, **EXPERTS, num_hidden_layers=num_layers)


def measure(kind: str) -> list[int]:
    """Count for one and three layers, without and with recomputation."""
    return [
        kept(architecture_of(kind, num_layers), is_checkpointed=is_checkpointed)
        for is_checkpointed in (False, True)
        for num_layers in (1, 3)
    ]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_activations_are_what_autograd_keeps(kind):
    def architecture(num_layers: int) -> DenseArchitecture:
        return architecture_of(kind, num_layers)

    # In a process of its own: storages are told apart by address, and addresses that earlier tests
    # have freed would be given to weights and activations in another order.
    one, three, inputs_one, inputs_three = run_ranks(1, measure, kind)[0]
    counted = [activation_bytes(inline_config(architecture(n)), shape_of()) for n in (1, 3)]
    # A tenth: masks, positions and index tensors are not counted.
    assert counted[1] - counted[0] == pytest.approx(three - one, rel=0.1)
    assert counted[1] == pytest.approx(three, rel=0.1)
    recomputed = [
        activation_bytes(inline_config(architecture(n)), shape_of(is_checkpointed=True))
        for n in (1, 3)
    ]
    # Exact but for positions: a layer keeps its input alone.
    assert recomputed[1] - recomputed[0] == pytest.approx(inputs_three - inputs_one, rel=0.02)


def test_largest_micro_batch_is_the_largest():
    hf_config = inline_config(MoEArchitecture(**SIZES, **EXPERTS, num_hidden_layers=2))
    specs = describe_rank(global_shapes(hf_config), MeshSizes(1, 1, 1), 0)
    num_local = sum(local_numel(spec) for spec in specs)

    def memory(num_packs: int):
        return step_memory(
            hf_config,
            specs,
            shape_of(num_packs),
            num_local=num_local,
            state_bytes=4 * num_local,
            optimizer_bytes=1000,
        )

    # From sixteen packs on the chunk of logits has its full size.
    capacity = memory(37).model_peak + 1
    assert largest_micro_batch(hf_config, memory(20), shape_of(20), capacity) == 37
    assert largest_micro_batch(hf_config, memory(20), shape_of(20), memory(20).held) == 0
    assert memory(20).model_peak < GIB
