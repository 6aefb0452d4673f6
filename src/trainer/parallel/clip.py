"""The gradient norm over every mesh and placement, and clipping by it.

Owns one number that all ranks agree on, and whether it is finite. Does not own what happens to a
step that is not finite: optimizers take the flag (`trainer.optim`), `trainer.step` counts.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from trainer.parallel.boxes import local_part


@dataclass(frozen=True)
class GradientNorm:
    """The norm of all gradients before clipping.

    Attributes:
        norm: 0-d fp64 on the device, equal on all ranks.
        finite: 0-d bool on the device, equal on all ranks; False if any rank has a nan or inf.
    """

    norm: Tensor
    finite: Tensor


def clip_gradients_(
    parameters: Iterable[torch.nn.Parameter], max_norm: float | None
) -> GradientNorm:
    """Scale all gradients in place so that their joint 2-norm is at most `max_norm`.

    Squares are summed in fp64: neither a thousand entries of 1e20 nor of 1e-25 leave its range,
    as they do that of fp32. A replicated gradient counts once. Nothing waits for the device.

    Args:
        parameters: Plain tensors (the same on all ranks) and DTensors on any mesh that spans the
            world; those without a gradient are skipped.
        max_norm: Above 0; None: only measure.

    Returns:
        The norm before clipping. Where it is not finite, gradients are left as they are.

    Collective: all ranks, one all-reduce of one number.
    """
    parameters = list(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    local_gradients = [local_part(gradient) for gradient in gradients]
    # All ranks reduce on the same kind of device, also one that has no gradient.
    device = parameters[0].device if parameters else torch.device("cpu")
    total = _sum_of_squares(gradients, local_gradients, device)
    dist.all_reduce(total)
    norm, finite = total.sqrt(), total.isfinite()
    if max_norm is not None and local_gradients:
        scale = torch.where(finite, (max_norm / norm).clamp(max=1.0), torch.ones_like(norm))
        torch._foreach_mul_(local_gradients, scale.to(torch.float32))
    return GradientNorm(norm=norm, finite=finite)


def _sum_of_squares(
    gradients: list[Tensor], local_gradients: list[Tensor], device: torch.device
) -> Tensor:
    """Return this rank's share of the sum of squares, fp64, 0-d."""
    held = [
        (local, _num_copies(whole))
        for whole, local in zip(gradients, local_gradients, strict=True)
        if local.numel()
    ]
    if not held:
        return torch.zeros((), dtype=torch.float64, device=device)
    # One fused pass that reads each gradient once; on GPUs no fp64 copy is made of any.
    norms = torch._foreach_norm([local for local, _ in held], 2, dtype=torch.float64)
    shares = torch._foreach_div(torch._foreach_mul(norms, norms), [copies for _, copies in held])
    return torch.stack(shares).sum()


def _num_copies(gradient: Tensor) -> int:
    """Return how many ranks hold each entry; their shares add up to one."""
    world_size = dist.get_world_size()
    if not isinstance(gradient, DTensor):
        return world_size
    num_shards = 1
    for axis, placement in enumerate(gradient.placements):
        assert not isinstance(placement, Partial), "a gradient must be reduced before its norm"
        if not isinstance(placement, Replicate):
            num_shards *= gradient.device_mesh.size(axis)
    return world_size // num_shards
