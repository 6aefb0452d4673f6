"""Public Newton-Schulz implementations to compare with; each is skipped where not installed.

All iterate five steps with the quintic rows, as ours does, except torch.optim.Muon's, which knows
one row for all steps: its time compares, its error does not.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from trainer.optim.coefficients import resolve_coefficients

Baseline = Callable[[Tensor], Tensor]
ROWS = resolve_coefficients("quintic", 5)
SEED = "quack_seed"


def find_baselines(
    names: Sequence[str], dtype: torch.dtype, device: torch.device
) -> dict[str, Baseline]:
    """Return those of the named baselines that can run here in `dtype`."""
    # Every shape is compiled apart; past the default of 8, torch quietly runs the eager code.
    torch._dynamo.config.recompile_limit = 1000
    found: dict[str, Baseline] = {}
    for name in names:
        dtypes, find = _FINDERS[name]
        if dtype not in dtypes or (device.type != "cuda" and name != "eager"):
            continue
        try:
            found[name] = find()
        except ImportError as error:
            print(f"baseline {name}: skipped, {error}")
    return found


def eager(X: Tensor) -> Tensor:
    """Iterate as torch code is usually written, in the dtype of X: no fused epilogue."""
    wide = X.mT if X.size(-2) > X.size(-1) else X
    wide = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in ROWS:
        A = wide @ wide.mT
        wide = a * wide + (b * A + c * (A @ A)) @ wide
    return wide.mT if X.size(-2) > X.size(-1) else wide


def _find_compiled() -> Baseline:
    return torch.compile(eager, dynamic=False)


def _find_dion_triton() -> Baseline:
    from dion.newton_schulz_triton import newton_schulz_triton

    return newton_schulz_triton


def _find_dion_dense() -> Baseline:
    from dion.newton_schulz_triton import zeropower_via_newtonschulz5

    return zeropower_via_newtonschulz5


def _find_quack_seed() -> Baseline:
    from quack.gemm_interface import gemm_symmetric

    return partial(_quack_seed, gemm_symmetric)


def _quack_seed(gemm_symmetric: Callable[..., Tensor], X: Tensor) -> Tensor:
    """QuACK's public call twice, at its built-in tile, then torch's product."""
    wide = X.mT if X.size(-2) > X.size(-1) else X
    wide = (wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)).contiguous()
    for a, b, c in ROWS:
        A = gemm_symmetric(wide, wide.mT)
        B = gemm_symmetric(A, A, C=A, alpha=c, beta=b)
        wide = torch.baddbmm(wide, B, wide, beta=a)
    return wide.mT if X.size(-2) > X.size(-1) else wide


def _find_gram_newton_schulz() -> Baseline:
    from gram_newton_schulz import GramNewtonSchulz

    # Its float16 is fixed; so is its restart at 2 for these rows.
    return GramNewtonSchulz(ns_coefficients=[list(row) for row in ROWS], compile_kwargs=None)


def _find_torch_muon() -> Baseline:
    from torch.optim._muon import _zeropower_via_newtonschulz as orthogonalize

    def torch_muon(X: Tensor) -> Tensor:
        # It takes one matrix at a time, and divides a bfloat16 one by its norm in place.
        matrices = X.clone().view(-1, *X.shape[-2:])
        row = (3.4445, -4.7750, 2.0315)
        return torch.stack([orthogonalize(matrix, row, len(ROWS), 1e-7) for matrix in matrices])

    return torch_muon


_BF16, _FP16 = torch.bfloat16, torch.float16
_FINDERS: dict[str, tuple[tuple[torch.dtype, ...], Callable[[], Baseline]]] = {
    "eager": ((torch.float32, _BF16, _FP16), lambda: eager),
    "compiled": ((torch.float32, _BF16, _FP16), _find_compiled),
    "dion_dense": ((_BF16,), _find_dion_dense),
    "dion_triton": ((_BF16,), _find_dion_triton),
    SEED: ((_BF16, _FP16), _find_quack_seed),
    "gram_newton_schulz": ((_FP16,), _find_gram_newton_schulz),
    "torch_muon": ((_BF16,), _find_torch_muon),
}

BASELINES = list(_FINDERS)
