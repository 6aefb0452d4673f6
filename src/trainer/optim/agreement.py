"""Which ranks must agree, before an update, on gradients that some of them lack: plain data.

Owns the sets of ranks and what each agrees on, a part of the plan. What is agreed and how it is
carried out is `presence.py`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.optim.spec import MeshSpec, ParameterSpec


@dataclass(frozen=True)
class Agreement:
    """One small all-reduce.

    Attributes:
        mesh: Of the ranks.
        axes: Axes of that mesh along which the ranks lie.
        parameters: Indices of the parameters that it is about, counted over all groups in order.
    """

    mesh: MeshSpec
    axes: tuple[int, ...]
    parameters: tuple[int, ...]


@dataclass(frozen=True)
class Agreements:
    """All that ranks agree on in a step, in order.

    Attributes:
        copies: Among ranks that hold copies of the same shards.
        meshes: Among all ranks of one or several meshes over the same ranks.
    """

    copies: tuple[Agreement, ...] = ()
    meshes: tuple[Agreement, ...] = ()

    def __len__(self) -> int:
        """Return the number of all-reduces."""
        return len(self.copies) + len(self.meshes)


def plan_agreements(specs: Sequence[ParameterSpec]) -> Agreements:
    """Return who agrees on what; the same on all ranks that describe the same parameters."""
    copies: dict[tuple[MeshSpec, tuple[int, ...]], list[int]] = {}
    members: dict[int, list[int]] = {}
    for index, spec in enumerate(specs):
        if spec.mesh is None or max(spec.mesh.sizes) == 1:
            continue
        members.setdefault(spec.mesh.members, []).append(index)
        axes = _replica_axes(spec)
        if axes:
            copies.setdefault((spec.mesh, axes), []).append(index)
    return Agreements(
        tuple(Agreement(mesh, axes, tuple(found)) for (mesh, axes), found in copies.items()),
        tuple(_whole_mesh(specs[found[0]], found) for found in members.values()),
    )


def _replica_axes(spec: ParameterSpec) -> tuple[int, ...]:
    sizes = spec.mesh.sizes if spec.mesh else ()
    return tuple(a for a, p in enumerate(spec.placements) if p.dim is None and sizes[a] > 1)


def _whole_mesh(first: ParameterSpec, parameters: list[int]) -> Agreement:
    assert first.mesh is not None
    return Agreement(first.mesh, tuple(range(len(first.mesh.sizes))), tuple(parameters))
