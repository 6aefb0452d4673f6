"""Statistics of the update s * O, per param group: its RMS and its largest singular value.

Owns their collection over chunks and ranks and their way to the host, without a wait.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_POWER_ITERATIONS = 16
"""An update's singular values lie within a third of one another, so the estimate is a few percent
low at worst, from any start."""


class UpdateStats:
    """Collects over one step; `read` gives metrics once the device is done."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        """Start collecting for groups of these names; only those observed are reported."""
        self._names = list(names)
        self._squares_G = torch.zeros(len(names), dtype=torch.float64, device=device)
        self._counts_G = torch.zeros(len(names), dtype=torch.float64, device=device)
        self._spectral_norms_G = torch.zeros(len(names), dtype=torch.float64, device=device)

    def observe(self, group: int, stack_BMN: Tensor, scale: float) -> None:
        """Count orthogonalized matrices of a group, to be scaled by `scale`."""
        stack_BMN = stack_BMN.float()
        self._squares_G[group] += stack_BMN.square().sum(dtype=torch.float64) * scale**2
        self._counts_G[group] += stack_BMN.numel()
        largest = scale * _spectral_norms(stack_BMN).max().double()
        self._spectral_norms_G[group] = torch.maximum(self._spectral_norms_G[group], largest)

    def reduce(self, group: dist.ProcessGroup | None) -> None:
        """Combine over ranks.

        Collective: two all-reduces on `group`; all its ranks.
        """
        if group is not None:
            sums = torch.stack([self._squares_G, self._counts_G])
            dist.all_reduce(sums, group=group)
            dist.all_reduce(self._spectral_norms_G, dist.ReduceOp.MAX, group=group)
            self._squares_G, self._counts_G = sums.unbind()

    def read(self) -> dict[str, float]:
        """Return the metrics; waits for the device, so call it when the step is long over."""
        metrics = {}
        rows = zip(
            self._names,
            self._squares_G.tolist(),
            self._counts_G.tolist(),
            self._spectral_norms_G.tolist(),
            strict=True,
        )
        for name, square, count, spectral_norm in rows:
            if count:
                metrics[f"optim/update_rms/{name}"] = (square / count) ** 0.5
                metrics[f"optim/update_spectral_norm/{name}"] = spectral_norm
        return metrics


def _spectral_norms(stack_BMN: Tensor) -> Tensor:
    """Return an estimate of each matrix's largest singular value, from power iteration."""
    x_BN1 = torch.ones_like(stack_BMN[:, :1]).mT
    # A start that no structured matrix is orthogonal to.
    x_BN1 = x_BN1 + torch.linspace(0, 1, x_BN1.shape[1], device=x_BN1.device)[:, None]
    for _ in range(_POWER_ITERATIONS):
        x_BN1 = x_BN1 / torch.linalg.vector_norm(x_BN1, dim=1, keepdim=True).clamp(min=1e-30)
        x_BN1 = stack_BMN.mT @ (stack_BMN @ x_BN1)
    return torch.linalg.vector_norm(x_BN1, dim=(1, 2)).sqrt()
