"""One Muon step on full tensors in float64, written from the update rule and nothing else."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


@dataclass(frozen=True)
class Rule:
    """Hyperparameters."""

    lr: float = 0.02
    mu: float = 0.95
    weight_decay: float = 0.1
    nesterov: bool = False
    cautious: bool = False
    adjust_lr: str | None = "rms_norm"
    flatten: bool = False
    num_row_blocks: int = 1


def orthogonalize(matrix: Tensor) -> Tensor:
    """Newton-Schulz with the quintic table, five steps, float64, one matrix."""
    X = matrix.double()
    X = X / X.norm() if X.norm() > 0 else X
    for a, b, c in QUINTIC:
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X


def scale(rows: int, cols: int, adjust_lr: str | None) -> float:
    if adjust_lr == "rms_norm":
        return 0.2 * math.sqrt(max(rows, cols))
    return math.sqrt(rows / cols) if adjust_lr == "spectral_norm" else 1.0


def reference_step(
    weight: Tensor, momentum: Tensor, gradient: Tensor, rule: Rule
) -> tuple[Tensor, Tensor]:
    """Return the new weight and momentum, float64."""
    weight, gradient = weight.double(), gradient.double()
    momentum = rule.mu * momentum.double() + gradient
    u = rule.mu * momentum + gradient if rule.nesterov else momentum
    first = 0 if rule.flatten and weight.ndim > 2 else weight.ndim - 2
    shape = (math.prod(weight.shape[:first]), weight.shape[first], -1)
    update = torch.stack(
        [
            torch.cat(
                [
                    scale(*block.shape, rule.adjust_lr) * orthogonalize(block)
                    for block in matrix.chunk(rule.num_row_blocks)
                ]
            )
            for matrix in u.reshape(shape)
        ]
    ).reshape(weight.shape)
    decay = rule.lr * rule.weight_decay
    kept = (weight * update >= 0).double() if rule.cautious else torch.ones_like(weight)
    return weight - decay * weight * kept - rule.lr * update, momentum
