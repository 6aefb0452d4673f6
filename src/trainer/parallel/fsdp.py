"""How FSDP2 shards modules: which mesh, which dtype, sums instead of means, what to prefetch.

Owns the policy, not the choice of modules: `trainer.model.setup` says what is an expert and what is
a layer. Meshes come from `mesh.py`.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from trainer.parallel.boxes import local_part
from trainer.parallel.mesh import EP, dense_mesh, ep_mesh, expert_fsdp_mesh


def shard_dense_(
    module: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype, *, reshard_after_forward: bool
) -> None:
    """Make `module` an FSDP unit over (`dp_replicate`, `dp_shard`), dim 0 split.

    Weights stay in the dtype they have (fp32 masters); the forward sees `compute_dtype`; gradients
    are added up in fp32.

    Args:
        module: Its parameters that no inner unit holds.
        mesh: From `build_mesh`.
        compute_dtype: Of the forward and backward.
        reshard_after_forward: False keeps whole weights until the backward: more memory, one
            all-gather less.
    """
    fsdp_mesh = dense_mesh(mesh)
    fully_shard(
        module,
        mesh=fsdp_mesh,
        reshard_after_forward=reshard_after_forward,
        mp_policy=_mixed_precision(compute_dtype),
    )
    _reduce_by_sum_(module, fsdp_mesh)


def shard_experts_(
    module: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype, *, reshard_after_forward: bool
) -> None:
    """Split a module of `[E, ...]` stacks over `ep`, then make it an FSDP unit over the rest.

    Each rank of the `ep` axis holds E/ep whole experts; FSDP splits those over `dp_shard_mod_ep`:
    dim 0 where it has experts enough, else dim 1 where that divides, else dim 0 with empty shards.

    Args:
        module: On the meta device; all its own parameters are stacks of the same E.
        mesh: From `build_mesh`; `ep` divides E.
        compute_dtype: Of the forward and backward.
        reshard_after_forward: As in `shard_dense_`.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, split_experts(parameter, mesh))
    fsdp_mesh = expert_fsdp_mesh(mesh)
    num_shards = fsdp_mesh.size(1)
    fully_shard(
        module,
        mesh=fsdp_mesh,
        reshard_after_forward=reshard_after_forward,
        mp_policy=_mixed_precision(compute_dtype),
        shard_placement_fn=lambda parameter: Shard(
            expert_shard_dim(tuple(local_part(parameter).shape), num_shards)
        ),
    )
    _reduce_by_sum_(module, fsdp_mesh)


def split_experts(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """Return a meta stack `[E, ...]` as a DTensor whose dim 0 is split over `ep`."""
    assert parameter.is_meta, "experts are split before they have values"
    axis = ep_mesh(mesh)
    local_shape = (parameter.shape[0] // axis.size(), *parameter.shape[1:])
    split = DTensor.from_local(
        parameter.new_empty(local_shape),
        axis,
        [Shard(0)],
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return nn.Parameter(split, requires_grad=parameter.requires_grad)


def expert_shard_dim(local_shape: tuple[int, ...], num_shards: int) -> int:
    """Return the dim that FSDP splits of a rank's experts, `[local_E, M, N]`.

    Example:
        expert_shard_dim((4, 64, 32), 8)  # 1: half of the shards would be empty on dim 0
    """
    too_few_experts = num_shards > local_shape[0]
    return 1 if too_few_experts and local_shape[1] % num_shards == 0 else 0


def describe_expert_shards(shape: tuple[int, ...], mesh: DeviceMesh) -> str:
    """Say how a stack of `shape` `[E, M, N]` is split, and what that costs where E is too small."""
    ep_size, num_shards = ep_mesh(mesh).size(), expert_fsdp_mesh(mesh).size(1)
    local_shape = (shape[0] // ep_size, *shape[1:])
    dim = expert_shard_dim(local_shape, num_shards)
    text = (
        f"{list(shape)}: {local_shape[0]} experts on each of ep={ep_size}, then dim {dim} over "
        f"dp_shard_mod_ep={num_shards}"
    )
    rows_a_shard = -(-local_shape[dim] // num_shards)
    num_empty = num_shards - -(-local_shape[dim] // rows_a_shard)
    return text + (f" ({num_empty} shards are empty)" if num_empty else "")


def prefetch_next_(units: Sequence[Sequence[nn.Module]]) -> None:
    """Gather the weights of layer i+1 while layer i computes, in the backward those of layer i-1.

    FSDP's own order looks one unit ahead, which for a layer of two units (dense part and experts)
    leaves the larger gather uncovered.

    Args:
        units: Per layer its FSDP units, outermost first.
    """
    for here, following in pairwise(units):
        _fsdp(here[0]).set_modules_to_forward_prefetch([_fsdp(unit) for unit in following])
        _fsdp(following[0]).set_modules_to_backward_prefetch([_fsdp(unit) for unit in here])


def units_alone(model: nn.Module) -> list[FSDPModule]:
    """Return the FSDP units that no other rank shards or copies.

    All units on one rank; with `ep` at its largest, those of experts. Their gradients can add up
    over micro-batches where they are, to be reduced once: the same sums, and no more memory, since
    a shard is as large as the whole.
    """
    return [module for module in model.modules() if _is_alone(module)]


def _is_alone(module: nn.Module) -> TypeGuard[FSDPModule]:
    if not isinstance(module, FSDPModule):
        return False
    inner = (m for m in module.modules() if isinstance(m, FSDPModule) and m is not module)
    of_inner = {id(parameter) for unit in inner for parameter in unit.parameters()}
    own = [p for p in module.parameters() if id(p) not in of_inner]
    return bool(own) and all(_num_fsdp_ranks(parameter) == 1 for parameter in own)


def _num_fsdp_ranks(parameter: Tensor) -> int:
    assert isinstance(parameter, DTensor), "FSDP shards every parameter of its units"
    mesh = parameter.device_mesh
    axes = mesh.mesh_dim_names or ()
    return prod(size for axis, size in zip(axes, mesh.shape, strict=True) if axis != EP)


def _mixed_precision(compute_dtype: torch.dtype) -> MixedPrecisionPolicy:
    # Inputs are not cast: activations already have the compute dtype, the rest is meant to differ.
    return MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def _reduce_by_sum_(module: nn.Module, mesh: DeviceMesh) -> None:
    # Losses are sums over the global token count already. gloo has no PREMUL_SUM, which a factor
    # would choose, so plain sums are forced; a factor of 1 then divides nothing.
    _fsdp(module).set_force_sum_reduction_for_comms(True)
    if mesh.size() > 1:
        # On one rank FSDP2 divides by any factor that is set, also by 1: two passes a gradient.
        _fsdp(module).set_gradient_divide_factor(1.0)


def _fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module
