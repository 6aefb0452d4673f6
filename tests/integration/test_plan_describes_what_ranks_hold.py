import pytest

from tests.support.spawn import run_ranks
from trainer.cli.planning.parameters import describe_rank, global_shapes, local_numel
from trainer.config.model import ModelConfig, MoEArchitecture
from trainer.config.parallel import ParallelConfig
from trainer.model import setup_model
from trainer.model.architecture import inline_config
from trainer.optim.spec import describe_parameters
from trainer.parallel import build_mesh
from trainer.parallel.mesh import resolve_sizes

ARCHITECTURE = MoEArchitecture(
    vocab_size=30,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    mlp_only_layers=(1,),
)
SPLITS = [
    ParallelConfig(dp_shard=4, device="cpu"),
    ParallelConfig(dp_shard=4, ep=2, device="cpu"),
    ParallelConfig(dp_replicate=2, ep=2, device="cpu"),
    ParallelConfig(dp_replicate=4, device="cpu"),
]


def real_parameters() -> list[list[tuple]]:
    """Describe what the model really holds, for every split."""
    config = ModelConfig(architecture=ARCHITECTURE, weights="random", compute_dtype="float32")
    found = []
    for parallel in SPLITS:
        model = setup_model(config, build_mesh(parallel, "cpu"))
        specs, _ = describe_parameters(model.named_parameters())
        local = {name: p.to_local().numel() for name, p in model.named_parameters()}
        found.append([(spec, local[spec.name]) for spec in specs])
    return found


@pytest.mark.distributed
def test_described_parameters_are_those_of_the_sharded_model():
    shapes = global_shapes(inline_config(ARCHITECTURE))
    for rank, by_split in enumerate(run_ranks(4, real_parameters)):
        for parallel, real in zip(SPLITS, by_split, strict=True):
            described = describe_rank(shapes, resolve_sizes(parallel, 4), rank)
            assert {spec.name: spec for spec in described} == {spec.name: spec for spec, _ in real}
            assert {s.name: local_numel(s) for s in described} == {s.name: n for s, n in real}
