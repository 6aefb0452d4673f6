"""Counts what autograd keeps for the backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def saved_bytes(function: Callable[[], Any], exclude: list[Tensor]) -> int:
    """Return the bytes of distinct storages saved while `function` runs, parameters apart.

    Args:
        function: A forward; its result is kept until the count is made.
        exclude: Tensors whose storages do not count.
    """
    storages: dict[int, int] = {}
    known = {tensor.untyped_storage().data_ptr() for tensor in exclude}
    kept = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept.append(function())
    return sum(storages.values())
