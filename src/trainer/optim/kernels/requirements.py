"""A requirement that is not met, and the refusal that lists all of them.

Owns the wording of "need / found / ways out". The requirements are the kernels' own.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from trainer.errors import UserError


class Unmet(NamedTuple):
    """What a kernel needs, and what was found instead."""

    need: str
    found: str


def refusal(
    kernel: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    unmet: Sequence[Unmet],
    way_out: str,
) -> UserError:
    """Return the error for a kernel asked for by name that cannot run.

    Args:
        kernel: as the user typed it.
        shape: (B, M, N) of the stack.
        dtype: of the iteration.
        unmet: at least one requirement.
        way_out: how to meet them; the other way out is always `auto`.
    """
    num_matrices, M, N = shape
    needs = "; ".join(f"needs {need}, found {found}" for need, found in unmet)
    what = f"{num_matrices} matrices of {M}x{N}, {str(dtype).removeprefix('torch.')}"
    return UserError(
        f'optim.kernel="{kernel}" cannot run ({what}): {needs}. '
        f'Either {way_out}, or set optim.kernel="auto", which chooses among the kernels that can.'
    )
