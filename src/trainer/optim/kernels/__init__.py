"""Newton-Schulz kernels: how the products of the iteration are computed, and which are chosen.

    select.py      which kernel for a shape, dtype and machine     (start here)
    iteration.py   the steps, alone or two at a time
    products.py    the products as a value; torch's               kernel `dense`
    symmetric.py, quack_default.py
                   QuACK's, on Hopper and elsewhere               kernels `symmetric` and `gram`
    syrk.py        emerging_optimizers'                           kernel `syrk`
    gram.py        which steps may be fused                       kernel `gram`
    weight_update.py
                   the last product of an iteration, applied to the weights
    identity.py    adding a multiple of the identity
    normalize.py   Frobenius normalization that cannot overflow
    matrix_table.py, passes_triton.py, passes_kernels.py
                   the elementwise passes of a step, over many parameters at once, on a GPU

Importing this package imports no kernel library.
"""

from trainer.optim.kernels.launches import launch_counts, reset_launch_counts
from trainer.optim.kernels.machine import THIS_MACHINE, Machine, assumed_machine
from trainer.optim.kernels.select import KernelChoice, choose_kernel

__all__ = [
    "THIS_MACHINE",
    "KernelChoice",
    "Machine",
    "assumed_machine",
    "choose_kernel",
    "launch_counts",
    "reset_launch_counts",
]
