"""What the optimizer knows of a parameter before any tensor moves: name, shape, dtype, placement.

Owns the plain descriptions and their making from live parameters (`describe_parameters`) or from
nothing but a config (`trainer plan` builds them itself). Does not decide anything: see `layout.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from trainer.errors import UserError


@dataclass(frozen=True)
class MeshSpec:
    """A device mesh as seen by one rank.

    Attributes:
        axes: Axis names, outermost first.
        sizes: Ranks along each axis.
        coordinate: This rank's position on each axis.
        index: Tells apart meshes that agree in all of the above and differ in their ranks.
        members: Equal for meshes over the same set of ranks, however they arrange them.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    coordinate: tuple[int, ...]
    index: int = 0
    members: int = 0


@dataclass(frozen=True)
class AxisPlacement:
    """How a tensor lies along one mesh axis.

    Attributes:
        dim: The tensor dim that the axis splits; None: every rank of the axis holds the same.
        split_factor: 1 for torch's `Shard`; for `_StridedShard` its factor: the dim is first cut
            into that many pieces and each piece is dealt over the axis.
    """

    dim: int | None = None
    split_factor: int = 1


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter. `shape` is global; without a mesh the parameter is whole on this rank."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    mesh: MeshSpec | None = None
    placements: tuple[AxisPlacement, ...] = ()


def describe_parameters(
    named_parameters: Iterable[tuple[str, torch.Tensor]],
) -> tuple[list[ParameterSpec], dict[MeshSpec, DeviceMesh]]:
    """Describe live parameters; also return the mesh that each `MeshSpec` stands for.

    Raises:
        UserError: a parameter has a placement that holds a pending sum, or is on other ranks only.
    """
    meshes: dict[MeshSpec, DeviceMesh] = {}
    members: dict[tuple[int, ...], int] = {}
    specs = []
    for name, parameter in named_parameters:
        dtype = str(parameter.dtype).removeprefix("torch.")
        shape = tuple(parameter.shape)
        if isinstance(parameter, DTensor):
            mesh = _describe_mesh(name, parameter.device_mesh, meshes, members)
            placements = tuple(_describe_placement(name, p) for p in parameter.placements)
            specs.append(ParameterSpec(name, shape, dtype, mesh, placements))
        else:
            specs.append(ParameterSpec(name, shape, dtype))
    return specs, meshes


def held_meshes(
    named_parameters: Iterable[tuple[str, torch.Tensor]],
) -> dict[MeshSpec, DeviceMesh]:
    """Return the meshes of live parameters that hold this rank."""
    meshes: dict[MeshSpec, DeviceMesh] = {}
    members: dict[tuple[int, ...], int] = {}
    for name, parameter in named_parameters:
        if isinstance(parameter, DTensor) and parameter.device_mesh.get_coordinate() is not None:
            _describe_mesh(name, parameter.device_mesh, meshes, members)
    return meshes


def _describe_mesh(
    name: str,
    mesh: DeviceMesh,
    known: dict[MeshSpec, DeviceMesh],
    members: dict[tuple[int, ...], int],
) -> MeshSpec:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UserError(
            f"parameter {name} lies on the mesh {mesh.mesh.tolist()}, which does not hold this "
            "rank: give each rank the parameters that it has a part of"
        )
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    number = members.setdefault(ranks, len(members))
    names = mesh.mesh_dim_names or tuple(f"axis{axis}" for axis in range(mesh.ndim))
    index = 0
    while True:
        spec = MeshSpec(tuple(names), tuple(mesh.shape), tuple(coordinate), index, number)
        if known.setdefault(spec, mesh) == mesh:
            return spec
        index += 1


def _describe_placement(name: str, placement: Placement) -> AxisPlacement:
    match placement:
        case Replicate():
            return AxisPlacement()
        # Before Shard: some torch versions derive one from the other, some do not.
        case _StridedShard():
            return AxisPlacement(placement.dim, int(placement.split_factor))
        case Shard():
            return AxisPlacement(placement.dim)
        case _:
            raise UserError(
                f"parameter {name} has placement {placement!r}: an optimizer needs parameters that "
                "are replicated or sharded; redistribute it first"
            )
