"""Newton-Schulz orthogonalization: one function over matrices, stacks, dtypes and kernels.

Owns the public functions and what they cost. Coefficients are coefficients.py's; kernels and their
selection are in kernels/ (start with kernels/select.py).
"""

from collections.abc import Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.optim.coefficients import CoefficientTable, Row, resolve_coefficients
from trainer.optim.kernels.gram import gram_segments, single_segments
from trainer.optim.kernels.iteration import iterate, num_square_buffers
from trainer.optim.kernels.launches import record_launch
from trainer.optim.kernels.normalize import normalized_copy
from trainer.optim.kernels.precision import ieee_matmul
from trainer.optim.kernels.products import ApplyFunction, Target, UpdateFunction
from trainer.optim.kernels.select import KernelChoice, choose_kernel

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def newton_schulz(
    X: Tensor,
    *,
    steps: int = 5,
    coefficients: CoefficientTable = "quintic",
    dtype: torch.dtype | None = None,
    kernel: str | KernelChoice = "auto",
) -> Tensor:
    """Orthogonalize each matrix: with X = U·S·Vᵀ, return about U·Vᵀ.

    Each matrix is divided by its Frobenius norm, then `steps` times X <- (a·I + b·A + c·A²)·X with
    A = X·Xᵀ (Xᵀ·X where there are more rows than columns). No matrix depends on its neighbours'
    values; zero stays zero; c·X gives the result of X for c > 0 from the smallest normal fp32 to
    the largest (bit for bit where c is a power of two).

    Args:
        X: [..., M, N], any float dtype and strides, local (not a DTensor); never written.
        steps: at least 1.
        coefficients: "quintic", "polar_express", "keller_jordan", or rows (a, b, c); steps beyond
            the table repeat its last row.
        dtype: of the iteration and the result: float32 (IEEE, TF32 off whatever the global
            setting), bfloat16 or float16; float64 for references. None: that of X.
        kernel: a name of `kernels.select.NAMES`, or the choice made at construction.

    Returns:
        [..., M, N] in `dtype`, newly allocated; row-major or column-major, whichever X is.

    Raises:
        UserError: a kernel that cannot run here, unknown coefficients, steps < 1.
        TypeError: X is no plain tensor or has fewer than two dims, or it or `dtype` is of a dtype
            not named above.

    Example:
        >>> newton_schulz(torch.diag(torch.tensor([3.0, 1.0])), steps=12).diagonal().round()
        tensor([1., 1.])
    """
    _check_types(X, dtype)
    dtype = X.dtype if dtype is None else dtype
    rows = resolve_coefficients(coefficients, steps)
    if X.numel() == 0:
        return torch.empty_like(X, dtype=dtype)
    stack_BMN = X.detach().reshape(-1, *X.shape[-2:])
    if not isinstance(kernel, KernelChoice):
        num_matrices, M, N = stack_BMN.shape
        kernel = choose_kernel(
            kernel, shape=(num_matrices, M, N), dtype=dtype, device=stack_BMN.device
        )
    with torch.no_grad():
        return _orthogonalize(stack_BMN, rows, dtype, kernel).reshape(X.shape)


def orthogonalize_normalized_(
    X_BMN: Tensor,
    *,
    steps: int = 5,
    coefficients: CoefficientTable = "quintic",
    kernel: KernelChoice,
) -> Tensor:
    """Do as `newton_schulz`, for matrices already divided by their Frobenius norms.

    Args:
        X_BMN: contiguous, of the iteration's dtype; overwritten.
        steps: as there.
        coefficients: as there.
        kernel: the choice for that shape and dtype.

    Returns:
        [B, M, N]: the buffer of `X_BMN` or a new one, in the layout that `X_BMN` has.
    """
    rows = resolve_coefficients(coefficients, steps)
    with torch.no_grad():
        return _iterate(X_BMN, rows, kernel)


def update_weights_(
    X_BMN: Tensor,
    targets: Sequence[Target],
    *,
    steps: int = 5,
    coefficients: CoefficientTable = "quintic",
    kernel: KernelChoice,
) -> None:
    """Do as `orthogonalize_normalized_`, and apply the result O to weights in the last product.

    W <- w * kept - step_size * O, with O not rounded before. Everything must be finite, also where
    `step_size` is 0 because the step is held back.

    Args:
        X_BMN: as there; overwritten.
        targets: the weights, all of the stack's matrices in order.
        steps: as there.
        coefficients: as there.
        kernel: one with `fuses_update`.
    """
    rows = resolve_coefficients(coefficients, steps)
    update = kernel.load_products().update
    assert update is not None, f"kernel {kernel.name!r} fuses no update"
    with torch.no_grad():
        _iterate(X_BMN, rows, kernel, partial(_apply_to_targets, update, targets))


def newton_schulz_symmetric(X: Tensor, epsilon: float = 0.0) -> Tensor:
    """Orthogonalize with the symmetric kernel, in the signature of dion's `newton_schulz_func`.

    Args:
        X: [..., M, N]; float16 and bfloat16 keep their dtype, others become bfloat16.
        epsilon: ignored; normalization here divides by the norm alone, and zero stays zero.

    Returns:
        [..., M, N] in float16 or bfloat16.

    Raises:
        UserError: QuACK, a GPU that it runs on, or a shape that it takes is missing.
    """
    dtype = X.dtype if X.dtype in (torch.float16, torch.bfloat16) else torch.bfloat16
    return newton_schulz(X, dtype=dtype, kernel="symmetric")


def newton_schulz_flops(
    shape: Sequence[int],
    *,
    steps: int = 5,
    coefficients: CoefficientTable = "quintic",
    dtype: torch.dtype = torch.bfloat16,
    kernel: KernelChoice,
) -> int:
    """Return the floating-point operations of one call (a multiply-add is two).

    Products that compute one triangle count half; one that a row multiplies by zero counts too.
    Equal for M x N and N x M.

    Args:
        shape: [..., M, N].
        steps: number of steps.
        coefficients: with `dtype`, they decide which steps `gram` fuses.
        dtype: of the iteration.
        kernel: the choice for that shape.
    """
    *_, M, N = shape
    shorter, longer = sorted((M, N))
    rows = resolve_coefficients(coefficients, steps)
    segments = _segments(rows, dtype, kernel, M, N)
    num_doubles = sum(length == 2 for length in segments)
    with_X = 2 * shorter * shorter * longer
    square = 2 * shorter**3
    symmetric_share = 0.5 if kernel.halves_symmetric else 1.0
    num_squares = len(segments) + 4 * num_doubles
    per_matrix = len(segments) * with_X + symmetric_share * (
        len(segments) * with_X + num_squares * square
    )
    return int(prod(shape[:-2]) * per_matrix)


def newton_schulz_workspace_bytes(
    shape: Sequence[int],
    *,
    steps: int = 5,
    coefficients: CoefficientTable = "quintic",
    dtype: torch.dtype = torch.bfloat16,
    kernel: KernelChoice,
    input_dtype: torch.dtype | None = None,
) -> int:
    """Return the peak bytes that one call allocates, its result included and its input not.

    Args:
        shape: [..., M, N].
        steps: number of steps.
        coefficients: with `dtype`, they decide which steps `gram` fuses.
        dtype: of the iteration.
        kernel: the choice for that shape.
        input_dtype: of X; None: `dtype`. Another dtype costs a temporary in fp32.
    """
    *_, M, N = shape
    shorter = min(M, N)
    segments = _segments(resolve_coefficients(coefficients, steps), dtype, kernel, M, N)
    matrices = 2 * M * N + num_square_buffers(segments) * shorter * shorter
    peak = matrices * dtype.itemsize
    if input_dtype not in (None, dtype):
        peak = max(peak, M * N * (4 + dtype.itemsize))
    return prod(shape[:-2]) * peak


def _check_types(X: Tensor, dtype: torch.dtype | None) -> None:
    if not isinstance(X, Tensor) or isinstance(X, DTensor):
        raise TypeError(
            f"newton_schulz takes a plain tensor, not a {type(X).__name__}: Muon orthogonalizes "
            "sharded parameters, full_tensor() makes one whole"
        )
    if X.layout != torch.strided:
        raise TypeError(f"newton_schulz takes dense matrices, not {X.layout}: to_dense() first")
    if X.ndim < 2:
        raise TypeError(f"newton_schulz takes matrices [..., M, N], not shape {tuple(X.shape)}")
    names = ", ".join(map(str, _DTYPES))
    if X.dtype not in _DTYPES:
        raise TypeError(f"newton_schulz takes {names}, not {X.dtype}: convert it first")
    if dtype is not None and dtype not in _DTYPES:
        raise TypeError(f"newton_schulz: dtype={dtype!r} is not one of {names}")


def _segments(
    rows: tuple[Row, ...], dtype: torch.dtype, kernel: KernelChoice, M: int, N: int
) -> tuple[int, ...]:
    if kernel.name == "gram":
        return gram_segments(rows, dtype, M, N)
    return single_segments(len(rows))


def _orthogonalize(
    X_BMN: Tensor, rows: tuple[Row, ...], dtype: torch.dtype, kernel: KernelChoice
) -> Tensor:
    """Normalize and iterate."""
    return _iterate(normalized_copy(X_BMN, dtype), rows, kernel)


def _iterate(
    X_BMN: Tensor,
    rows: tuple[Row, ...],
    kernel: KernelChoice,
    last_apply: ApplyFunction | None = None,
) -> Tensor:
    """Iterate normalized matrices, on the transposed view of tall ones."""
    _, M, N = X_BMN.shape
    is_tall = M > N
    record_launch(f"newton_schulz.{kernel.name}")
    segments = _segments(rows, X_BMN.dtype, kernel, M, N)
    wide_BMN = X_BMN.mT if is_tall else X_BMN
    with ieee_matmul(X_BMN.dtype):
        result_BMN = iterate(wide_BMN, rows, segments, kernel.load_products(), last_apply)
    return result_BMN.mT if is_tall else result_BMN


def _apply_to_targets(
    update: UpdateFunction,
    targets: Sequence[Target],
    S_BMM: Tensor,
    X_BMN: Tensor,
    beta: float,
    _: Tensor,
) -> None:
    """Do an iteration's last product target by target; what it would be written to stays unused."""
    first = 0
    for target in targets:
        part = slice(first, first + len(target.weights_BMN))
        is_tall = target.weights_BMN.shape[1] > target.weights_BMN.shape[2]
        weights_BMN = target.weights_BMN.mT if is_tall else target.weights_BMN
        update(S_BMM[part], X_BMN[part], beta, weights_BMN, target.kept, target.step_size)
        first = part.stop
