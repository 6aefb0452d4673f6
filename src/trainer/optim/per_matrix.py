"""The slow reference, `impl = "per_matrix"`: gather each parameter, orthogonalize, keep the shard.

Owns the gathering, which is exact whatever the placement: every rank writes what it holds into
zeros and the ranks add up. Shares nothing with the stacked step but the elementwise passes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from trainer.optim.bucketing import lr_scale
from trainer.optim.flight import StepInputs
from trainer.optim.layout import local_slices
from trainer.optim.passes import apply_updates_, directions, update_momentum_
from trainer.optim.per_matrix_plan import num_blocks
from trainer.optim.spec import MeshSpec, ParameterSpec
from trainer.optim.state import as_matrices, local
from trainer.optim.timing import PhaseTimer


class PerMatrixStep:
    """Updates one parameter after another, each by every rank that holds a part of it."""

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        meshes: dict[MeshSpec, DeviceMesh],
        timer: PhaseTimer,
        orthogonalize: Callable[[Tensor], Tensor],
        *,
        split_gate_up: bool,
    ) -> None:
        """Keep what steps have in common.

        Args:
            specs: Of all parameters, as `StepInputs` counts them.
            meshes: The mesh of each description.
            timer: Gets the phases; nothing overlaps, so all of the exchange is exposed.
            orthogonalize: From matrices [B, M, N] in float32 to their orthogonalization.
            split_gate_up: Orthogonalize gate and up each on their own.
        """
        self._specs, self._meshes, self._timer = specs, meshes, timer
        self._orthogonalize, self._split_gate_up = orthogonalize, split_gate_up

    def run(self, inputs: StepInputs) -> None:
        """Update momentum and weights of all parameters in Muon's groups.

        Collective: for each, one all-reduce over each mesh axis that shards it, in order; all ranks
        of its mesh.
        """
        index = 0
        for number, group in enumerate(inputs.groups):
            for parameter in group["params"]:
                if group["algorithm"] == "muon" and parameter.numel():
                    self._update_parameter_(index, number, inputs)
                index += 1

    def _update_parameter_(self, index: int, group_number: int, inputs: StepInputs) -> None:
        spec, parameter = self._specs[index], inputs.parameters[index]
        group, gate = inputs.groups[group_number], inputs.gates[index]
        m = local(inputs.momentum(index))
        gradient = None if parameter.grad is None else local(parameter.grad)
        with self._timer.measure("momentum"):
            update_momentum_([m], [gradient], [gate], group["mu"])
            (u,) = directions([m], [gradient], [gate], group["mu"], nesterov=group["nesterov"])
        start = self._timer.mark()
        whole = _gather(u, spec, self._meshes)
        stop = self._timer.mark()
        self._timer.add("exchange", start, stop)
        self._timer.add("exchange_exposed", start, stop)
        with self._timer.measure("newton_schulz"):
            blocks = self._blocks(spec, whole, group)
            updates = [self._orthogonalize(block) for block in blocks]
        scale = lr_scale(blocks[0].shape[1], blocks[0].shape[2], group["adjust_lr"])
        if inputs.stats is not None:
            for update_BMN in updates:
                inputs.stats.observe(group_number, update_BMN, scale)
        with self._timer.measure("update"):
            update = torch.cat(updates, dim=1).reshape(spec.shape)
            apply_updates_(
                [local(parameter)],
                [_shard(update, local_slices(spec))],
                [gate],
                step_size=float(group["lr"]) * scale,
                decay=float(group["lr"]) * float(group["weight_decay"]),
                cautious=group["cautious_wd"],
            )

    def _blocks(
        self, spec: ParameterSpec, whole: Tensor, group: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        """Return what is orthogonalized each on its own: all matrices, or their gates and ups."""
        matrices_BMN = as_matrices(whole, flatten=group["flatten"])
        return matrices_BMN.chunk(num_blocks(spec, split_gate_up=self._split_gate_up), dim=1)


def _gather(u: Tensor, spec: ParameterSpec, meshes: dict[MeshSpec, DeviceMesh]) -> Tensor:
    """Return the whole tensor in float32.

    Collective: one all-reduce (sum) over each mesh axis that shards it; all ranks of its mesh.
    """
    if spec.mesh is None:
        return u.float()
    whole = torch.zeros(spec.shape, dtype=torch.float32, device=u.device)
    whole[_grid(local_slices(spec), u.device)] = u.float()
    for axis, placement in enumerate(spec.placements):
        if placement.dim is not None and spec.mesh.sizes[axis] > 1:
            dist.all_reduce(whole, group=meshes[spec.mesh].get_group(axis))
    return whole


def _shard(whole: Tensor, indices: Sequence[tuple[int, ...]]) -> Tensor:
    return whole[_grid(indices, whole.device)]


def _grid(indices: Sequence[tuple[int, ...]], device: torch.device) -> tuple[Tensor, ...]:
    """Return index tensors that broadcast to the block a rank holds."""
    return tuple(
        torch.tensor(places, dtype=torch.long, device=device).view(
            *(-1 if other == dim else 1 for other in range(len(indices)))
        )
        for dim, places in enumerate(indices)
    )
