"""Whether a model's values are finite, before anything of it is written."""

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.parallel.boxes import local_part


def non_finite_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names whose values on this rank hold a NaN or an infinity.

    One pass over each tensor, nothing of its size allocated, one wait for the device.
    """
    parts = {name: local_part(tensor) for name, tensor in tensors.items()}
    parts = {
        name: part for name, part in parts.items() if part.numel() and part.is_floating_point()
    }
    if not parts:
        return []
    # A NaN survives both extremes, an infinity is one.
    flags = torch.stack([torch.stack(part.aminmax()).isfinite().all() for part in parts.values()])
    return [name for name, finite in zip(parts, flags.tolist(), strict=True) if not finite]
