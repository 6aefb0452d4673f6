"""Counts what autograd keeps for the backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def saved_bytes(function: Callable[[], Any], model: nn.Module) -> int:
    """Return the bytes of distinct storages saved while `function` runs, weights apart.

    Storages are told apart by identity and measured at the end, when those of gathered weights
    that were given back are empty.

    Args:
        function: A forward; its result is kept until the count is made.
        model: Whose weights do not count.
    """
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        # A tensor that is kept keeps its storage, whose identity is then no other's.
        kept.setdefault(_identity(tensor), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    weights = {_identity(parameter) for parameter in model.parameters()}
    del result
    return sum(
        tensor.untyped_storage().nbytes()
        for identity, tensor in kept.items()
        if identity not in weights
    )


def _identity(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()._cdata
