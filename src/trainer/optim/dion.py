"""The real dion.Muon for A/B runs: imported only when asked for (extra `dion`).

Owns its adaptation to our optimizers' interface. Its kernels and placements are its own; what it
would silently get wrong is refused here.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from dion import Muon as _DionMuon  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainer.config.optim import DionConfig
from trainer.errors import UserError
from trainer.optim.checks import check_flag
from trainer.optim.groups import NamedGroup, parse_groups
from trainer.optim.interface import TrainerOptimizer
from trainer.optim.spec import MeshSpec, ParameterSpec, describe_parameters
from trainer.optim.state import local


class DionMuon(_DionMuon, TrainerOptimizer):
    """microsoft/dion's Muon with `finite`, `settle` and `timings`."""

    @classmethod
    def from_config(
        cls,
        config: DionConfig,
        groups: list[dict[str, Any]],
        newton_schulz_func: Callable[[Tensor, float], Tensor] | None = None,
    ) -> Self:
        """Build it as the config says.

        Args:
            config: The `[optim]` section.
            groups: Named param groups.
            newton_schulz_func: (X, epsilon) -> orthogonalized X; None: dion's own, as configured.

        Raises:
            UserError: a placement that dion does not handle.
        """
        named = parse_groups(groups)
        muon = [group for group in named if group.settings["algorithm"] == "muon"]
        for group in muon:
            if group.settings["flatten"]:
                _check_flattened(group)
        specs, meshes = describe_parameters(pair for g in muon for pair in g.named_parameters)
        axis_mesh = _axis_mesh(specs, meshes)
        settings: dict[str, Any] = {
            "distributed_mesh": axis_mesh,
            "lr": config.lr,
            "mu": config.mu,
            "betas": (config.betas1, config.betas2),
            "weight_decay": config.weight_decay,
            "cautious_wd": config.cautious_wd,
            "epsilon": config.epsilon,
            "nesterov": config.nesterov,
            "adjust_lr": config.adjust_lr,
            "flatten": config.flatten,
            "use_gram_newton_schulz": config.use_gram_newton_schulz,
            "use_triton": config.use_triton,
            "use_polar_express": config.use_polar_express,
            "newton_schulz_func": newton_schulz_func,
        }
        return cls([group.as_param_group() for group in named], **settings)

    _was_applied = True

    @torch.no_grad()
    def step(
        self, closure: Callable[[], float] | None = None, *, finite: Tensor | None = None
    ) -> float | None:
        """Step unless `finite` is False; dion has no gate, so the flag is read here and now."""
        check_flag(finite, local(self.param_groups[0]["params"][0]).device)
        self._was_applied = finite is None or bool(finite)
        return super().step(closure) if self._was_applied else None

    def settle(self) -> bool:
        """Return whether the last step was applied."""
        return self._was_applied

    def phase_times(self) -> Callable[[], dict[str, float]]:
        """Return a reader of nothing: dion does not time its phases."""
        return dict

    def timings(self) -> dict[str, float]:
        """Return nothing: dion does not time its phases."""
        return {}


def _axis_mesh(
    specs: Sequence[ParameterSpec], meshes: dict[MeshSpec, DeviceMesh]
) -> DeviceMesh | None:
    """Return the one axis that dion exchanges over; None: all parameters are plain tensors.

    Where no matrix is cut, dion still asks for a mesh: over the longest axis it shares whole
    matrices out, which every rank of it holds.
    """
    axes = {axis for spec in specs for axis in [_cut_axis(spec)] if axis is not None}
    submeshes = {(meshes[mesh_spec], axis) for mesh_spec, axis in axes}
    if len(submeshes) > 1:
        raise UserError(
            "optim.type='dion': matrices are sharded over several mesh axes and dion "
            "exchanges over one; set optim.type='muon' or change parallel"
        )
    for spec in specs:
        if spec.mesh is not None and not submeshes:
            submeshes = {(meshes[spec.mesh], spec.mesh.sizes.index(max(spec.mesh.sizes)))}
    for mesh, axis in submeshes:
        return mesh if mesh.ndim == 1 else _slice(mesh, axis)
    return None


def _slice(mesh: DeviceMesh, axis: int) -> DeviceMesh:
    if mesh.mesh_dim_names is None:
        raise UserError(
            "optim.type='dion': parameters lie on a mesh of several axes without names; give "
            "mesh_dim_names, or set optim.type='muon'"
        )
    return mesh[mesh.mesh_dim_names[axis]]


def _check_flattened(group: NamedGroup) -> None:
    """Refuse what dion stacks before it flattens, so that it takes a whole stack for one matrix.

    Of 0a059a4, `muon_update_newton_schulz`: parameters of one shape, and sharded ones, come to it
    stacked. Delete when dion flattens first.
    """
    first: dict[tuple[int, ...], str] = {}
    for name, parameter in group.named_parameters:
        shape = tuple(parameter.shape)
        other = first.setdefault(shape, name)
        if other != name or isinstance(parameter, DTensor):
            why = f"has the shape of {other}" if other != name else "is sharded"
            raise UserError(
                f"optim.type='dion' with optim.flatten=true: parameter {name} {list(shape)} {why}, "
                "and dion would flatten them as one matrix; set optim.flatten=false or "
                "optim.type='muon'"
            )


def _cut_axis(spec: ParameterSpec) -> Any:
    """Return (mesh, axis) that cuts the matrices of a parameter, None if they are whole."""
    sizes = spec.mesh.sizes if spec.mesh else ()
    shards = [(a, p) for a, p in enumerate(spec.placements) if p.dim is not None and sizes[a] > 1]
    cutting = [a for a, p in shards if p.dim is not None and p.dim >= len(spec.shape) - 2]
    strided = [a for a, p in shards if p.split_factor > 1]
    # dion sees only plain shards; a strided one beside them on the stack dim is as harmless.
    if len(cutting) > 1 or set(strided) & set(cutting):
        raise UserError(
            f"optim.type='dion': parameter {spec.name} {list(spec.shape)} is cut over several "
            "axes, or several times over one dim, which dion does not handle; set "
            "optim.type='muon' or change parallel"
        )
    return (spec.mesh, cutting[0]) if cutting else None
