"""The inputs on which every kernel is judged: Gaussian is easy, low rank is where variants part.

Owns the six inputs that gram.py, the tests and scripts/bench/newton_schulz.py share.
"""

import torch
from torch import Tensor

_NOISE_RANK = 64


def hard_inputs(
    M: int, N: int, *, seed: int = 0, device: torch.device | None = None
) -> dict[str, Tensor]:
    """Return matrices of M x N (M <= N), float64, of Frobenius norm 1, by name.

    Gaussian; rank 1 (the gradient of an expert that saw one token); rank 4; rank 64 plus noise of
    1e-3; singular values from 1 to 1e-6; one row a million times the others. Drawn on `device`
    (None: the CPU, where a seed gives the same on every machine up to the last bits).
    """
    generator = torch.Generator(device or "cpu").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(
            *shape, generator=generator, dtype=torch.float64, device=generator.device
        )

    rank = min(_NOISE_RANK, M)
    matrices = {
        "gaussian": normal(M, N),
        "rank_1": normal(M, 1) @ normal(1, N),
        "rank_4": normal(M, 4) @ normal(4, N),
        "rank_64_noise": normal(M, rank) @ normal(rank, N) / rank**0.5 + 1e-3 * normal(M, N),
        "spectrum_1e-6": _with_spectrum(normal(M, M), normal(N, M)),
        "one_large_row": _with_large_row(normal(M, N)),
    }
    return {name: X_MN / torch.linalg.vector_norm(X_MN) for name, X_MN in matrices.items()}


def _with_spectrum(left_MM: Tensor, right_NM: Tensor) -> Tensor:
    """Return a matrix of singular values 1 … 1e-6, evenly spaced in the logarithm."""
    values_M = torch.logspace(0, -6, left_MM.shape[0], dtype=left_MM.dtype, device=left_MM.device)
    return torch.linalg.qr(left_MM).Q * values_M @ torch.linalg.qr(right_NM).Q.mT


def _with_large_row(X_MN: Tensor) -> Tensor:
    X_MN[X_MN.shape[0] // 2] *= 1e6
    return X_MN
