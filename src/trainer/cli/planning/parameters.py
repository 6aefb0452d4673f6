"""The parameters of a run as each rank would hold them, without ranks: for `trainer plan`.

Owns the description of what `trainer.model.setup` and `trainer.parallel.fsdp` do to shapes; a test
holds it against the real thing. Builds transformers' own network on the meta device, whose names
and shapes are ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM

from trainer.model.architecture import QwenConfig
from trainer.optim.layout import local_shape
from trainer.optim.spec import AxisPlacement, MeshSpec, ParameterSpec
from trainer.parallel.fsdp import expert_shard_dim
from trainer.parallel.mesh import DP_REPLICATE, DP_SHARD, DP_SHARD_MOD_EP, EP, MeshSizes

MASTER_DTYPE = "float32"


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP gathers together.

    Attributes:
        numel: Elements that a rank has while they are gathered.
        num_shards: Ranks over which they are sharded otherwise.
    """

    numel: int
    num_shards: int


@dataclass(frozen=True)
class LayerUnits:
    """The units of one layer: all but its experts, and those."""

    dense: Unit
    experts: Unit | None

    @property
    def units(self) -> tuple[Unit, ...]:
        """Both, or the one there is."""
        return (self.dense,) if self.experts is None else (self.dense, self.experts)

    @property
    def numel(self) -> int:
        """Elements of the whole layer, gathered."""
        return sum(unit.numel for unit in self.units)


def global_shapes(hf_config: QwenConfig) -> dict[str, tuple[int, ...]]:
    """Return every parameter's name and global shape."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def describe_rank(
    shapes: dict[str, tuple[int, ...]], sizes: MeshSizes, rank: int
) -> list[ParameterSpec]:
    """Describe the parameters as one rank holds them.

    Args:
        shapes: From `global_shapes`.
        sizes: The mesh axes.
        rank: Global rank, row-major over the axes.
    """
    replica, shard = divmod(rank, sizes.dp_shard)
    mod_ep, ep_rank = divmod(shard, sizes.ep)
    dense = MeshSpec(
        (DP_REPLICATE, DP_SHARD), (sizes.dp_replicate, sizes.dp_shard), (replica, shard)
    )
    expert = MeshSpec(
        (DP_REPLICATE, DP_SHARD_MOD_EP, EP),
        (sizes.dp_replicate, sizes.dp_shard_mod_ep, sizes.ep),
        (replica, mod_ep, ep_rank),
    )
    return [
        ParameterSpec(name, shape, MASTER_DTYPE, expert, _expert_placements(shape, sizes))
        if is_expert(name)
        else ParameterSpec(name, shape, MASTER_DTYPE, dense, (AxisPlacement(), AxisPlacement(0)))
        for name, shape in shapes.items()
    ]


def is_expert(name: str) -> bool:
    """Return whether a parameter is a stack of experts."""
    return ".mlp.experts." in name


def _expert_placements(shape: tuple[int, ...], sizes: MeshSizes) -> tuple[AxisPlacement, ...]:
    held = (shape[0] // sizes.ep, *shape[1:])
    dim = expert_shard_dim(held, sizes.dp_shard_mod_ep)
    # FSDP splits what `ep` left: over the same dim that is torch's _StridedShard.
    split = AxisPlacement(dim, sizes.ep if dim == 0 else 1)
    return AxisPlacement(), split, AxisPlacement(0)


def gather_units(specs: Sequence[ParameterSpec]) -> tuple[Unit, list[LayerUnits]]:
    """Return the units that FSDP makes: embeddings, last norm and output; then the layers'."""
    members: dict[tuple[str, bool], list[ParameterSpec]] = {}
    for spec in specs:
        words = spec.name.split(".")
        layer = words[2] if words[1] == "layers" else ""
        members.setdefault((layer, is_expert(spec.name)), []).append(spec)
    made = {key: _unit(held) for key, held in members.items()}
    layers = [layer for layer, are_experts in made if layer and not are_experts]
    return made["", False], [LayerUnits(made[i, False], made.get((i, True))) for i in layers]


def _unit(specs: Sequence[ParameterSpec]) -> Unit:
    mesh = specs[0].mesh
    assert mesh is not None
    # Axes are (dp_replicate, the one FSDP shards over, and for experts ep).
    return Unit(sum(gathered_numel(spec) for spec in specs), mesh.sizes[1])


def local_numel(spec: ParameterSpec) -> int:
    """Return how many elements of a parameter its rank holds."""
    return torch.Size(local_shape(spec)).numel()


def gathered_numel(spec: ParameterSpec) -> int:
    """Return how many elements its rank holds while the parameter is gathered for computing."""
    size = torch.Size(spec.shape).numel()
    if not is_expert(spec.name):
        return size
    assert spec.mesh is not None
    return size // spec.mesh.sizes[-1]
