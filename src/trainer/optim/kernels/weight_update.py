# pyright: reportMissingImports=false, reportUntypedFunctionDecorator=false
"""The last product of an iteration, applied to the weights in its epilogue.

Owns the epilogue. The update O = S·X + beta·X is never written: a tile of it meets a tile of the
weights while both are on the multiprocessor, and the next tile is multiplied meanwhile. Importing
this module imports QuACK; symmetric.py does so when its products are asked for.
"""

from typing import Any

from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.ops import Scalar, TileLoad
from torch import Tensor

from trainer.optim.kernels.launches import record_launch
from trainer.optim.kernels.products import is_column_major


@gemm_epilogue(
    ops={
        "x": TileLoad("x"),
        "beta": Scalar("beta"),
        "kept": Scalar("kept"),
        "step_size": Scalar("step_size"),
    }
)
def _step_weight(acc, c, x, beta, kept, step_size):
    return {"D": c * kept - (acc + x * beta) * step_size}


def update_weights_(
    S_BMM: Tensor,
    X_BMN: Tensor,
    beta: float,
    weights_BMN: Tensor,
    kept: Tensor,
    step_size: Tensor,
    options: dict[str, Any],
) -> None:
    """W <- w * kept - step_size * (S·X + beta·X).

    Args:
        S_BMM: symmetric, float16 or bfloat16, contiguous.
        X_BMN: of that dtype, row- or column-major.
        beta: as it says.
        weights_BMN: float32, in the layout of `X_BMN`.
        kept: [1], float32, on the device.
        step_size: [1], float32, on the device.
        options: tile and schedule, as `quack.gemm` takes them.
    """
    record_launch("quack.weight_update")
    left, right, x, weights = S_BMM, X_BMN, X_BMN, weights_BMN
    if is_column_major(X_BMN):
        # Xᵀ·S, whose rows are contiguous; S stands for its own transpose.
        left, right, x, weights = X_BMN.mT, S_BMM, X_BMN.mT, weights_BMN.mT
    operands = {"x": x, "beta": beta, "kept": kept, "step_size": step_size}
    _step_weight.gemm(left, right, weights, weights, epi_args=operands, b_kn=True, **options)
