"""The elementwise passes of Muon over a rank's own matrices: momentum before, weights after.

Owns their arithmetic and the gating by a device flag. Lists in, so that a pass can be compiled into
one kernel for a whole chunk.
"""

from collections.abc import Generator, Sequence

import torch
from torch import Tensor


def update_momentum_(
    momenta: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    gates: Sequence[Tensor | None],
    mu: float,
) -> None:
    """M <- mu * m + g, in m's dtype.

    Args:
        momenta: Local matrices, modified in place.
        gradients: Of the same shapes; None counts as zeros.
        gates: For each, a 0-d bool: False leaves m as it is; None: no gate.
        mu: Momentum factor.
    """
    for m, g, gate in zip(momenta, gradients, gates, strict=True):
        new = m.mul_(mu) if gate is None else m * mu
        if g is not None:
            new.add_(g.to(m.dtype))
        if gate is not None:
            torch.where(gate, new, m, out=m)


def directions(
    momenta: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    gates: Sequence[Tensor | None],
    mu: float,
    *,
    nesterov: bool,
) -> Generator[Tensor]:
    """Yield what is orthogonalized: m, or with Nesterov mu * m + g. Never write to the results.

    A gradient behind a shut gate, which may hold nan and inf, counts as zeros: directions are
    finite whatever it holds, for products that apply an update of factor 0.

    Args:
        momenta: Local matrices.
        gradients: As `update_momentum_` took them.
        gates: As there.
        mu: Momentum factor.
        nesterov: Whether to look ahead.
    """
    for m, g, gate in zip(momenta, gradients, gates, strict=True):
        if not nesterov:
            yield m
        elif g is None:
            yield m * mu
        else:
            g = g.to(m.dtype)
            yield (m * mu).add_(g if gate is None else torch.where(gate, g, 0.0))


def apply_updates_(
    weights: Sequence[Tensor],
    updates: Sequence[Tensor],
    gates: Sequence[Tensor | None],
    *,
    step_size: float,
    decay: float,
    cautious: bool,
) -> None:
    """W <- w * (1 - decay) - step_size * O; cautious: decay only where w and O agree in sign.

    Args:
        weights: Local matrices, modified in place.
        updates: Orthogonalized, of the same shapes, any float dtype.
        gates: For each, a 0-d bool: False leaves w as it is, whatever O holds; None: no gate.
        step_size: lr * s.
        decay: lr * weight_decay.
        cautious: Whether decay is cautious.
    """
    for w, update, gate in zip(weights, updates, gates, strict=True):
        if cautious:
            opposed = (w * update) < 0
            new = w - torch.where(opposed, 0.0, w * decay)
        else:
            new = w * (1 - decay) if gate is not None else w.mul_(1 - decay)
        new.add_(update, alpha=-step_size)
        if gate is not None:
            torch.where(gate, new, w, out=w)
        elif cautious:
            w.copy_(new)
