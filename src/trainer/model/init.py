"""Random weights as a function of seed, parameter name and global index, on any sharding.

Owns the numbers. Each matrix, and each expert of a stack, is drawn whole from its own generator on
the CPU and the local part is kept, so neither the number of ranks nor the device changes a weight.
`setup.py` says which parameters to fill.
"""

import hashlib

import torch
from torch import Tensor, nn

from trainer.parallel.boxes import Box, local_box, local_part


@torch.no_grad()
def init_random_(model: nn.Module, *, seed: int, std: float) -> None:
    """Fill every parameter of `model` with its initial value, one parameter at a time.

    Matrices and stacks are normal with mean 0 and deviation `std`, norms are 1, biases 0 (the
    rules of transformers' Qwen3). A rank draws only matrices and experts that it holds a part of.

    Args:
        model: Materialized; parameters plain or DTensor.
        seed: Of the run.
        std: The architecture's `initializer_range`.
    """
    for name, parameter in model.named_parameters():
        box = local_box(parameter)
        if box.is_empty:
            continue
        local = local_part(parameter)
        if name.endswith("norm.weight"):
            local.fill_(1.0)
        elif name.endswith("bias"):
            local.zero_()
        elif parameter.ndim == 3:
            _fill_stack_(local, name, tuple(parameter.shape), box, seed=seed, std=std)
        else:
            matrix = draw_normal(seed, name, tuple(parameter.shape))
            local.copy_(matrix[box.slices].mul_(std))


def draw_normal(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return standard normal numbers, fp32 on the CPU, that depend on the arguments alone."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def _fill_stack_(
    local: Tensor, name: str, shape: tuple[int, ...], box: Box, *, seed: int, std: float
) -> None:
    """Fill the local part of an expert stack `[E, M, N]`, one expert at a time."""
    experts, *within = box.slices
    for local_expert, expert in enumerate(range(experts.start, experts.stop)):
        matrix = draw_normal(seed, f"{name}[{expert}]", shape[1:])
        local[local_expert].copy_(matrix[tuple(within)].mul_(std))
