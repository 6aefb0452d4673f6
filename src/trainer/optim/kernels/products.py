"""The matrix products that Newton-Schulz is made of, as a value: a kernel is a choice of products.

Owns the `Products` interface and its form in plain torch. QuACK's is in symmetric.py, that of
emerging_optimizers in syrk.py; iteration.py composes them into steps.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.optim.kernels.identity import add_identity
from trainer.optim.kernels.launches import record_launch

GramFunction = Callable[[Tensor, Tensor], None]
SymmetricFunction = Callable[[Tensor, Tensor, Tensor, float, float, Tensor], None]
ApplyFunction = Callable[[Tensor, Tensor, float, Tensor], None]
ShiftFunction = Callable[[Tensor, float, Tensor], None]
UpdateFunction = Callable[[Tensor, Tensor, float, Tensor, Tensor, Tensor], None]


@dataclass(frozen=True)
class Products:
    """Four products on batches; M <= N here, all operands of one dtype.

    An output is never an operand, except that `shift` may work in place.

    Attributes:
        gram: `(X_BMN, out_BMM)`: out = X·Xᵀ.
        symmetric: `(A_BMM, Z_BMM, C_BMM, alpha, beta, out_BMM)`: out = alpha·A·Z + beta·C for
            symmetric A, Z and C that commute, so that half of the result suffices.
        apply: `(S_BMM, X_BMN, beta, out_BMN)`: out = S·X + beta·X for symmetric S.
        shift: `(Z_BMM, a, out_BMM)`: out = Z + a·I.
        halves_symmetric: `gram` and `symmetric` compute one triangle and mirror it.
        update: `(S_BMM, X_BMN, beta, weights_BMN, kept, step_size)`, in place of a last `apply`:
            W <- w * kept - step_size * (S·X + beta·X), for fp32 weights in the layout of X and
            two fp32 numbers on the device. None: there is no such product.
    """

    gram: GramFunction
    symmetric: SymmetricFunction
    apply: ApplyFunction
    shift: ShiftFunction
    halves_symmetric: bool
    update: UpdateFunction | None = None


@dataclass(frozen=True)
class Target:
    """Weights that take an update as it is made.

    Attributes:
        weights_BMN: float32, of consecutive matrices of a stack, in its layout.
        kept: float32 [1], on their device: what is kept of them.
        step_size: float32 [1], there: what is taken of the update.
    """

    weights_BMN: Tensor
    kept: Tensor
    step_size: Tensor


def is_column_major(X_BMN: Tensor) -> bool:
    """Tell whether the rows' dim is the contiguous one, as in the transpose of a tall matrix."""
    return X_BMN.stride(-1) != 1


def torch_gram(X_BMN: Tensor, out_BMM: Tensor) -> None:
    """Write X·Xᵀ, in full."""
    record_launch("torch.bmm")
    torch.bmm(X_BMN, X_BMN.mT, out=out_BMM)


def torch_symmetric(
    A_BMM: Tensor, Z_BMM: Tensor, C_BMM: Tensor, alpha: float, beta: float, out_BMM: Tensor
) -> None:
    """Write alpha·A·Z + beta·C, in full, scaled and added in the product's epilogue."""
    if alpha == 0.0:
        # A row without a fifth power. There torch 2.13's bfloat16 baddbmm leaves a CPU's `out` as
        # it finds it and adds to that.
        torch.mul(C_BMM, beta, out=out_BMM)
        return
    record_launch("torch.baddbmm")
    torch.baddbmm(C_BMM, A_BMM, Z_BMM, alpha=alpha, beta=beta, out=out_BMM)


def torch_apply(S_BMM: Tensor, X_BMN: Tensor, beta: float, out_BMN: Tensor) -> None:
    """Write S·X + beta·X, in the layout that `X_BMN` has."""
    if is_column_major(X_BMN):
        _torch_apply_right(S_BMM, X_BMN.mT, beta, out_BMN.mT)
    elif beta == 0.0:
        record_launch("torch.bmm")
        torch.bmm(S_BMM, X_BMN, out=out_BMN)
    else:
        record_launch("torch.baddbmm")
        torch.baddbmm(X_BMN, S_BMM, X_BMN, beta=beta, out=out_BMN)


def _torch_apply_right(S_BMM: Tensor, X_BNM: Tensor, beta: float, out_BNM: Tensor) -> None:
    """Write X·S + beta·X, which for a symmetric S is the transpose of `torch_apply`."""
    if beta == 0.0:
        record_launch("torch.bmm")
        torch.bmm(X_BNM, S_BMM.mT, out=out_BNM)
    else:
        record_launch("torch.baddbmm")
        torch.baddbmm(X_BNM, X_BNM, S_BMM.mT, beta=beta, out=out_BNM)


def torch_products() -> Products:
    """Return the products of kernel `dense`: any device, any float dtype."""
    return Products(
        gram=torch_gram,
        symmetric=torch_symmetric,
        apply=torch_apply,
        shift=add_identity,
        halves_symmetric=False,
    )
