"""The iteration itself: steps of X <- (a·I + b·A + c·A²)·X with A = X·Xᵀ, alone or two at a time.

Owns the order of the products and their buffers. Normalization happens before (normalize.py);
which products run is the kernel's choice (select.py); how steps are grouped is gram.py's.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trainer.optim.coefficients import Row
from trainer.optim.kernels.products import ApplyFunction, Products

_SQUARES_OF_SINGLE_STEP = 2
_SQUARES_OF_DOUBLE_STEP = 4


def num_square_buffers(segments: Sequence[int]) -> int:
    """Return how many M x M temporaries per matrix `iterate` allocates."""
    return _SQUARES_OF_DOUBLE_STEP if 2 in segments else _SQUARES_OF_SINGLE_STEP


def iterate(
    X_BMN: Tensor,
    rows: Sequence[Row],
    segments: Sequence[int],
    products: Products,
    last_apply: ApplyFunction | None = None,
) -> Tensor:
    """Apply all rows to a batch of normalized matrices and return the result.

    A segment of length 1 is the standard step. A segment of length 2 fuses two rows into one
    polynomial of the Gram matrix before it touches X: cheaper by one product with X and one Gram
    product, for three more products of M x M matrices, hence worth it where N is well above M.

    Args:
        X_BMN: M <= N, Frobenius norm at most 1; overwritten (it is one of the two buffers).
        rows: one (a, b, c) a step.
        segments: lengths, 1 or 2, that add up to the number of rows.
        products: how to multiply.
        last_apply: takes the place of the last `products.apply`, and may put its result anywhere.

    Returns:
        [B, M, N] in the layout of `X_BMN`: that buffer or a new one; what the last `apply` wrote.
    """
    assert sum(segments) == len(rows), "the segments must cover the rows"
    other_BMN = torch.empty_like(X_BMN)
    num_matrices, M, _ = X_BMN.shape
    squares = [X_BMN.new_empty(num_matrices, M, M) for _ in range(num_square_buffers(segments))]
    start = 0
    for length in segments:
        if last_apply is not None and start + length == len(rows):
            products = replace(products, apply=last_apply)
        if length == 1:
            _single_step(X_BMN, rows[start], products, squares, other_BMN)
        else:
            _double_step(X_BMN, rows[start : start + 2], products, squares, other_BMN, start == 0)
        X_BMN, other_BMN = other_BMN, X_BMN
        start += length
    return X_BMN


def _single_step(
    X_BMN: Tensor, row: Row, products: Products, squares: list[Tensor], out_BMN: Tensor
) -> None:
    """Write a·X + (b·A + c·A²)·X with A = X·Xᵀ."""
    a, b, c = row
    A_BMM, B_BMM = squares[:2]
    products.gram(X_BMN, A_BMM)
    products.symmetric(A_BMM, A_BMM, A_BMM, c, b, B_BMM)
    products.apply(B_BMM, X_BMN, a, out_BMN)


def _double_step(
    X_BMN: Tensor,
    rows: Sequence[Row],
    products: Products,
    squares: list[Tensor],
    out_BMN: Tensor,
    is_first: bool,
) -> None:
    """Write P₂·P₁·X, where P₁ and P₂ are both evaluated on Gram matrices.

    With A = X·Xᵀ and P₁ = a₁·I + Z₁, the Gram matrix after the first row is P₁·A·P₁. The order
    P₂·P₁ matters: P₂ was made from a Gram matrix that P₁ had already touched, and applying them
    the other way round loses a tenth of the exactness.

    Singular values are small before the first row, so P₂·P₁ is close to a₁·a₂·I there: that
    multiple is kept out of the rounded matrix and added by the last product. Later it is not
    close to any multiple, and keeping one apart would round a difference of large numbers.
    """
    (a1, b1, c1), (a2, b2, c2) = rows
    gram_BMM, Z1_BMM, half_BMM, next_gram_BMM = squares
    products.gram(X_BMN, gram_BMM)
    products.symmetric(gram_BMM, gram_BMM, gram_BMM, c1, b1, Z1_BMM)
    products.symmetric(gram_BMM, Z1_BMM, gram_BMM, 1.0, a1, half_BMM)
    products.symmetric(Z1_BMM, half_BMM, half_BMM, 1.0, a1, next_gram_BMM)
    Z2_BMM = gram_BMM
    products.symmetric(next_gram_BMM, next_gram_BMM, next_gram_BMM, c2, b2, Z2_BMM)
    P1_BMM = half_BMM if is_first else Z1_BMM
    products.shift(Z1_BMM, a1, P1_BMM)
    kept_apart, addend_BMM = (a1 * a2, Z1_BMM) if is_first else (0.0, P1_BMM)
    product_BMM = next_gram_BMM
    products.symmetric(Z2_BMM, P1_BMM, addend_BMM, 1.0, a2, product_BMM)
    products.apply(product_BMM, X_BMN, kept_apart, out_BMN)
