"""Which rows may be fused on the Gram matrix: chosen by simulated error on the worst inputs.

Owns the choice of segments (where the iteration restarts from X) for a coefficient table, a dtype
and an aspect ratio. The steps themselves are in iteration.py.

Fusing rows saves products with X but rounds a polynomial of larger degree, and on low-rank input
that can go wrong by any amount: at 512x768 of rank 1, five rows fused in bfloat16 gave a largest
singular value of 1.4e4. So a grouping is admitted only if it is at least as exact as the standard
iteration in the same dtype on every input of inputs.py.

Source: the iteration on the Gram matrix with restarts is that of Dao-AILab/gram-newton-schulz.
Ours fuses at most two rows, keeps their product in order, keeps a multiple of the identity out of
the rounded matrix in the first pair, and chooses restarts by measured error instead of by the
condition of Q.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import groupby

import torch
from torch import Tensor

from trainer.optim.coefficients import Row, resolve_coefficients
from trainer.optim.kernels.inputs import hard_inputs
from trainer.optim.kernels.iteration import iterate
from trainer.optim.kernels.products import Products

PROBE_ROWS = 96
"""Rounding noise is largest, relative to the signal, on small matrices: a small probe is strict.
Matrices of fewer rows than it are not simulated, and nothing is fused on them."""

ASPECTS = (4 / 3, 2, 4)
"""Aspect ratios simulated; a matrix uses the largest that it reaches. Below the first, fusing saves
less than a twentieth of the FLOPs (nothing on squares), and nothing is fused."""

MIN_ROWS_OF_ANY_ASPECT = 1024
"""Smaller matrices count as of the first aspect ratio, whatever theirs. On one H200 (torch 2.11,
quack-kernels 0.6.5, 2026-11-30, scripts/bench/newton_schulz.py) fusing two pairs of rows at
768x2048 made the error on Gaussian input 1.06 (bfloat16) and 1.05 (float16) times dense's, which
the simulation does not show; at 2048x4096 and beyond it was 0.91 to 0.98."""

_ERROR_MARGIN = 1.02
"""Admitted error over that of the standard iteration: the spread between random matrices."""

_SIMULATED_DTYPES = (torch.float16, torch.bfloat16)
"""Products of these are summed in fp32, and one rounding is all that happens to them. In float32
the sums err as much as the rounding, by an amount that depends on the library: nothing is fused."""

_COMMITTED_STEPS = 5
_NONE_FUSED = (1, 1, 1, 1, 1)
_FIRST_FUSED = (2, 1, 1, 1)
_TWO_FUSED = (2, 2, 1)
COMMITTED_SEGMENTS: Mapping[str, Mapping[torch.dtype, tuple[tuple[int, ...], ...]]] = {
    "quintic": {
        torch.bfloat16: (_FIRST_FUSED, _TWO_FUSED, _TWO_FUSED),
        torch.float16: (_FIRST_FUSED, _TWO_FUSED, _TWO_FUSED),
    },
    "polar_express": {
        torch.bfloat16: (_NONE_FUSED, _NONE_FUSED, _NONE_FUSED),
        torch.float16: (_NONE_FUSED, _NONE_FUSED, _NONE_FUSED),
    },
    "keller_jordan": {
        torch.bfloat16: (_NONE_FUSED, _FIRST_FUSED, _TWO_FUSED),
        torch.float16: (_NONE_FUSED, _NONE_FUSED, _TWO_FUSED),
    },
}
"""What `simulate_segments` returns for the named tables at five steps, by aspect of `ASPECTS`."""

_MAX_PROBED_STEPS = 6
"""Beyond, the number of groupings grows too fast to try all; later rows stay single."""


def gram_segments(rows: Sequence[Row], dtype: torch.dtype, M: int, N: int) -> tuple[int, ...]:
    """Return the lengths (1 or 2) of the segments for matrices of M x N, in either orientation.

    Deterministic: read from the committed table, or simulated once per process for a table, dtype
    and aspect class, in fp64 with every product rounded to `dtype`, so that no machine's matmul
    decides.
    """
    shorter, longer = sorted((M, N))
    is_simulated = dtype in _SIMULATED_DTYPES and shorter >= PROBE_ROWS
    if not is_simulated or longer < ASPECTS[0] * shorter:
        return single_segments(len(rows))
    reached = [aspect for aspect in ASPECTS if aspect * shorter <= longer]
    aspect = reached[-1 if shorter >= MIN_ROWS_OF_ANY_ASPECT else 0]
    committed = _committed_segments(tuple(rows), dtype)
    if committed is not None:
        return committed[ASPECTS.index(aspect)]
    probed = tuple(rows[:_MAX_PROBED_STEPS])
    return simulate_segments(probed, dtype, aspect) + single_segments(len(rows) - len(probed))


def single_segments(num_rows: int) -> tuple[int, ...]:
    """Return the segments of the standard iteration: a restart before every row."""
    return (1,) * num_rows


def _committed_segments(
    rows: tuple[Row, ...], dtype: torch.dtype
) -> tuple[tuple[int, ...], ...] | None:
    for name, by_dtype in COMMITTED_SEGMENTS.items():
        if rows == resolve_coefficients(name, _COMMITTED_STEPS):
            return by_dtype[dtype]
    return None


@lru_cache(maxsize=256)
def simulate_segments(rows: tuple[Row, ...], dtype: torch.dtype, aspect: float) -> tuple[int, ...]:
    """Return the shortest grouping that is exact enough, the most exact among equally short.

    Args:
        rows: at most a few, since every grouping of the shortest kinds is tried.
        dtype: float16 or bfloat16.
        aspect: long side over short side of the simulated matrices.
    """
    standard = single_segments(len(rows))
    X_BMN = torch.stack(list(hard_inputs(PROBE_ROWS, round(aspect * PROBE_ROWS)).values()))
    exact_BMN = iterate(X_BMN.clone(), rows, standard, _rounding_products(X_BMN.dtype))

    def errors(segments: tuple[int, ...]) -> Tensor:
        rounded_BMN = X_BMN.to(dtype).to(X_BMN.dtype)
        result_BMN = iterate(rounded_BMN, rows, segments, _rounding_products(dtype))
        error_B = torch.linalg.vector_norm(result_BMN - exact_BMN, dim=(-2, -1))
        return error_B.nan_to_num(nan=float("inf"))

    allowed_B = _ERROR_MARGIN * errors(standard)
    for _, group in groupby(_groupings(len(rows)), key=len):
        worst = {segments: float((errors(segments) / allowed_B).max()) for segments in group}
        best = min(worst, key=lambda segments: worst[segments])
        if worst[best] <= 1.0:
            return best
    return standard


def _groupings(num_rows: int) -> list[tuple[int, ...]]:
    """Return every way to cut the rows into ones and twos, shortest first."""
    if num_rows == 0:
        return [()]
    cuts = [(1, *rest) for rest in _groupings(num_rows - 1)]
    if num_rows >= 2:
        cuts += [(2, *rest) for rest in _groupings(num_rows - 2)]
    return sorted(cuts, key=len)


def _rounding_products(dtype: torch.dtype) -> Products:
    """Return fp64 products whose results are rounded to `dtype` and mirrored, as a GPU's are."""
    return Products(
        gram=partial(_rounded_gram, dtype),
        symmetric=partial(_rounded_symmetric, dtype),
        apply=partial(_rounded_apply, dtype),
        shift=partial(_rounded_shift, dtype),
        halves_symmetric=True,
    )


def _store(dtype: torch.dtype, value: Tensor, out: Tensor) -> None:
    out.copy_(value.to(dtype))


def _mirrored(square_BMM: Tensor) -> Tensor:
    return square_BMM.tril() + square_BMM.tril(-1).mT


def _rounded_gram(dtype: torch.dtype, X_BMN: Tensor, out: Tensor) -> None:
    _store(dtype, _mirrored(X_BMN @ X_BMN.mT), out)


def _rounded_symmetric(
    dtype: torch.dtype,
    A_BMM: Tensor,
    Z_BMM: Tensor,
    C_BMM: Tensor,
    alpha: float,
    beta: float,
    out: Tensor,
) -> None:
    _store(dtype, _mirrored(alpha * (A_BMM @ Z_BMM) + beta * C_BMM), out)


def _rounded_apply(
    dtype: torch.dtype, S_BMM: Tensor, X_BMN: Tensor, beta: float, out: Tensor
) -> None:
    _store(dtype, S_BMM @ X_BMN + beta * X_BMN, out)


def _rounded_shift(dtype: torch.dtype, Z_BMM: Tensor, a: float, out: Tensor) -> None:
    identity_MM = torch.eye(Z_BMM.shape[-1], dtype=Z_BMM.dtype, device=Z_BMM.device)
    _store(dtype, Z_BMM + a * identity_MM, out)
