"""Parameter descriptions of Qwen3-30B-A3B as this project shards them, without any model."""

from trainer.optim.spec import AxisPlacement, MeshSpec, ParameterSpec

REPLICATED = AxisPlacement()
D, F, E, V = 2048, 768, 128, 151936


def qwen3_30b_a3b(
    rank: int, *, dp_replicate: int = 1, dp_shard: int = 8, ep: int = 8, num_layers: int = 48
) -> list[ParameterSpec]:
    """Return every parameter as one rank sees it."""
    mod = dp_shard // ep
    replica, shard = divmod(rank, dp_shard)
    dense_mesh = MeshSpec(("dp_replicate", "dp_shard"), (dp_replicate, dp_shard), (replica, shard))
    expert_mesh = MeshSpec(
        ("dp_replicate", "dp_shard_mod_ep", "ep"),
        (dp_replicate, mod, ep),
        (replica, *divmod(shard, ep)),
    )
    dense_places = (REPLICATED, AxisPlacement(0))
    expert_places = (REPLICATED, AxisPlacement(0, split_factor=ep), AxisPlacement(0))

    def dense(name: str, *shape: int) -> ParameterSpec:
        return ParameterSpec(name, shape, "float32", dense_mesh, dense_places)

    def expert(name: str, *shape: int) -> ParameterSpec:
        return ParameterSpec(name, shape, "float32", expert_mesh, expert_places)

    specs = [dense("model.embed_tokens.weight", V, D)]
    for i in range(num_layers):
        layer = f"model.layers.{i}"
        specs += [
            dense(f"{layer}.self_attn.q_proj.weight", 4096, D),
            dense(f"{layer}.self_attn.k_proj.weight", 512, D),
            dense(f"{layer}.self_attn.v_proj.weight", 512, D),
            dense(f"{layer}.self_attn.o_proj.weight", D, 4096),
            dense(f"{layer}.self_attn.q_norm.weight", 128),
            dense(f"{layer}.mlp.gate.weight", E, D),
            expert(f"{layer}.mlp.experts.gate_up_proj", E, 2 * F, D),
            expert(f"{layer}.mlp.experts.down_proj", E, D, F),
            dense(f"{layer}.input_layernorm.weight", D),
        ]
    return [*specs, dense("model.norm.weight", D), dense("lm_head.weight", V, D)]
