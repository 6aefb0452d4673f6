from itertools import product

import pytest
import torch

from tests.support.allocated import allocated
from tests.support.saved import saved_bytes
from tests.support.spawn import run_ranks
from trainer.cli.planning.activations import Shape, count_activations
from trainer.config.model import Architecture, DenseArchitecture, ModelConfig, MoEArchitecture
from trainer.config.parallel import ParallelConfig
from trainer.model import setup_model
from trainer.model.architecture import inline_config
from trainer.parallel import build_mesh

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
WIDE = SIZES | {"hidden_size": 96, "num_attention_heads": 6, "head_dim": 16}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
MANY = {"num_experts": 16, "num_experts_per_tok": 5, "moe_intermediate_size": 24}
NETWORKS = {
    "dense": DenseArchitecture(**SIZES, num_hidden_layers=1),
    "dense wide": DenseArchitecture(**WIDE, num_hidden_layers=3),
    "moe": MoEArchitecture(**SIZES, **EXPERTS, num_hidden_layers=1),
    "moe deep": MoEArchitecture(**WIDE, **MANY, num_hidden_layers=3),
    "moe and dense layers": MoEArchitecture(
        **SIZES, **EXPERTS, num_hidden_layers=4, mlp_only_layers=(1, 3)
    ),
}
BYTES = {"bfloat16": 2, "float32": 4}
CASES = [
    *product(NETWORKS, ["bfloat16"], ["sdpa"], [False, True]),
    *product(["moe deep"], ["float32"], ["sdpa", "eager"], [False, True]),
]
NUM_PACKS, SEQ_LEN = 2, 96
TOLERANCE = 0.05
"""Not counted: the state of the CPU's generator that recomputation keeps for each layer (5 KiB)."""


def shape_of(dtype, attention, is_checkpointed) -> Shape:
    return Shape(
        NUM_PACKS,
        SEQ_LEN,
        compute_bytes=BYTES[dtype],
        attention=attention,
        logits_chunk_tokens=1024,
        is_checkpointed=is_checkpointed,
        keeps_gathered=False,
        num_micro_batches=1,
        is_dispatched=False,
    )


def counted(network, dtype, attention, is_checkpointed) -> int:
    shape = shape_of(dtype, attention, is_checkpointed)
    return count_activations(inline_config(NETWORKS[network]), shape).after_forward


def measure(cases) -> list[tuple[int, int]]:
    """For each case: bytes saved by autograd, and bytes that a forward leaves allocated."""
    return [measure_one(NETWORKS[network], *case) for network, *case in cases]


def measure_one(
    architecture: Architecture, dtype: str, attention: str, is_checkpointed: bool
) -> tuple[int, int]:
    config = ModelConfig(
        architecture=architecture,
        weights="random",
        compute_dtype=dtype,
        attention=attention,
        activation_checkpointing=is_checkpointed,
    )
    model = setup_model(config, build_mesh(ParallelConfig(device="cpu"), "cpu"))
    ids = torch.arange(NUM_PACKS * SEQ_LEN).view(NUM_PACKS, SEQ_LEN) % 64
    positions = torch.arange(SEQ_LEN).repeat(NUM_PACKS, 1)

    def forward():
        return model(ids, position_ids=positions, target_ids=ids)

    forward().log_probs_PS.sum().backward()
    saved = saved_bytes(forward, model)
    # FSDP keeps the outermost unit's weights gathered.
    gathered = sum(p.numel() for name, p in model.named_parameters() if "layers" not in name)
    model.reshard()
    return saved, allocated(forward).left - gathered * BYTES[dtype]


def test_activations_are_what_a_forward_keeps():
    for case, (saved, left) in zip(CASES, run_ranks(1, measure, CASES)[0], strict=True):
        assert counted(*case) == pytest.approx(left, rel=TOLERANCE), case
        _, _, _, is_checkpointed = case
        if not is_checkpointed:  # recomputation keeps tensors where autograd's hooks do not see
            assert counted(*case) == pytest.approx(saved, rel=TOLERANCE), case


def test_flex_attention_keeps_keys_and_values_once():
    network = inline_config(NETWORKS["moe"])
    sdpa, flex = (
        count_activations(network, shape_of("bfloat16", attention, False)).after_forward
        for attention in ("sdpa", "flex_attention")
    )
    # Two of four heads' keys and values, and the mask that sdpa makes of positions.
    per_token = 2 * (4 - 2) * 32 * 2 + SEQ_LEN * 2
    assert sdpa - flex == NUM_PACKS * SEQ_LEN * per_token


def test_a_layer_that_is_recomputed_exists_once():
    network = inline_config(NETWORKS["moe deep"])
    kept = count_activations(network, shape_of("bfloat16", "sdpa", True))
    whole = count_activations(network, shape_of("bfloat16", "sdpa", False))
    assert kept.layers == whole.layers
    assert kept.before_layer(2) - kept.before_layer(1) == kept.inputs
    assert whole.before_layer(2) - whole.before_layer(1) == sum(vars(whole.layers[1]).values())
