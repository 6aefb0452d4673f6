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

from trainer.optim.bucketing import is_gate_up, lr_scale
from trainer.optim.layout import local_slices
from trainer.optim.passes import apply_updates_, directions, update_momentum_
from trainer.optim.spec import MeshSpec, ParameterSpec
from trainer.optim.state import as_matrices, local


def per_matrix_update_(
    spec: ParameterSpec,
    parameter: Tensor,
    momentum: Tensor,
    group: dict[str, Any],
    gate: Tensor | None,
    meshes: dict[MeshSpec, DeviceMesh],
    orthogonalize: Callable[[Tensor], Tensor],
    *,
    split_gate_up: bool,
) -> None:
    """Update momentum and weight of one parameter.

    Args:
        spec: The parameter's description.
        parameter: The parameter, with or without a gradient.
        momentum: Its momentum.
        group: Its param group.
        gate: 0-d bool that lets the update through; None: open.
        meshes: The mesh of each description.
        orthogonalize: From matrices [B, M, N] in float32 to their orthogonalization.
        split_gate_up: Orthogonalize gate and up each on their own.

    Collective: one all-reduce over each mesh axis that shards the parameter; all ranks of its mesh.
    """
    m, gradient = local(momentum), None
    if parameter.grad is not None:
        gradient = local(parameter.grad)
    update_momentum_([m], [gradient], [gate], group["mu"])
    u = next(directions([m], [gradient], group["mu"], nesterov=group["nesterov"]))
    whole = _gather(u, spec, meshes)
    matrices_BMN = as_matrices(whole, flatten=group["flatten"])
    num_blocks = 2 if split_gate_up and is_gate_up(spec.name) else 1
    blocks = matrices_BMN.chunk(num_blocks, dim=1)
    updates = [orthogonalize(block) for block in blocks]
    update = torch.cat(updates, dim=1).reshape(spec.shape)
    scale = lr_scale(blocks[0].shape[1], blocks[0].shape[2], group["adjust_lr"])
    apply_updates_(
        [local(parameter)],
        [_shard(update, local_slices(spec))],
        [gate],
        step_size=float(group["lr"]) * scale,
        decay=float(group["lr"]) * float(group["weight_decay"]),
        cautious=group["cautious_wd"],
    )


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
