"""QuACK's products at tiles of its own choice, for GPUs on which ours are not measured.

Owns the calls into QuACK's public interface. Hopper's are symmetric.py's, which chooses.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from trainer.optim.kernels.identity import add_identity
from trainer.optim.kernels.launches import record_launch
from trainer.optim.kernels.products import Products, is_column_major

MODULES = ("quack.gemm_interface",)
"""All that these products import."""


def default_products() -> Products:
    """Import QuACK and return its products for float16 and bfloat16.

    Raises:
        ImportError: quack-kernels, or something that it needs, is missing.
    """
    from quack.gemm_interface import gemm, gemm_add, gemm_symmetric  # pyright: ignore[reportMissingImports]

    return Products(
        gram=partial(_gram, gemm_symmetric),
        symmetric=partial(_symmetric, gemm_symmetric),
        apply=partial(_apply, gemm, gemm_add),
        shift=add_identity,
        halves_symmetric=True,
    )


def _gram(kernel: Callable[..., object], X_BMN: Tensor, out: Tensor) -> None:
    record_launch("quack.gemm_symmetric")
    kernel(X_BMN, X_BMN.mT, out=out)


def _symmetric(
    kernel: Callable[..., object],
    A_BMM: Tensor,
    Z_BMM: Tensor,
    C_BMM: Tensor,
    alpha: float,
    beta: float,
    out: Tensor,
) -> None:
    record_launch("quack.gemm_symmetric")
    kernel(A_BMM, Z_BMM, C=C_BMM, out=out, alpha=alpha, beta=beta)


def _apply(
    multiply: Callable[..., object],
    multiply_add: Callable[..., object],
    S_BMM: Tensor,
    X_BMN: Tensor,
    beta: float,
    out: Tensor,
) -> None:
    record_launch("quack.gemm")
    left, right, result = S_BMM, X_BMN, out
    if is_column_major(X_BMN):
        left, right, result = X_BMN.mT, S_BMM, out.mT
    if beta == 0.0:
        multiply(left, right, out=result, tuned=False)
    else:
        addend = right if left is S_BMM else left
        multiply_add(left, right, addend, out=result, beta=beta, tuned=False)
