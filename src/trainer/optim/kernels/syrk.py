"""The Triton SYRK of emerging_optimizers, called directly, behind a gate that never falls back.

Owns the gate (version, signature, Triton, GPU, dtype, shape) and the products made of the kernels.
Nothing of the package is looked up unless `syrk` is asked for by name.

Source: NVIDIA-NeMo/Emerging-Optimizers. Its `newton_schulz` is bypassed, because it uses the
kernel only under the process-wide matmul precision "medium" and skips misaligned shapes and
unsupported GPUs with a log line. `tsyrk_ex` is in every release; batches came with
`batched_tsyrk_ex` in 0.5.0a0, and before it a batch is a loop.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
from packaging.version import InvalidVersion, Version
from torch import Tensor

from trainer.optim.kernels.identity import add_identity
from trainer.optim.kernels.launches import record_launch
from trainer.optim.kernels.machine import Capability, Machine
from trainer.optim.kernels.products import Products, torch_apply
from trainer.optim.kernels.requirements import Unmet

DISTRIBUTION = "emerging-optimizers"
MODULE = "emerging_optimizers.triton_kernels"
MINIMUM_VERSION = "0.4.0.dev0"
ALIGNMENT = 8
"""Both dims: TMA reads 16 bytes, eight bfloat16 values, at a time."""

CAPABILITIES: tuple[Capability, ...] = ((8, 0), (9, 0), (10, 0), (10, 3))
"""The GPUs whose results emerging_optimizers itself vouches for."""

Kernel = Callable[..., Tensor]


@dataclass(frozen=True)
class SyrkKernels:
    """The kernel to call: `batched` for a whole stack, or `single` for one matrix after another."""

    single: Kernel | None
    batched: Kernel | None


def is_version_at_least(version: str, minimum: str) -> bool:
    """Compare versions by PEP 440: 0.4.0a0 is at least 0.4.0.dev0, 0.3.1 is not.

    A version that does not parse is not at least anything.
    """
    try:
        return Version(version) >= Version(minimum)
    except InvalidVersion:
        return False


def find_syrk_kernels(
    machine: Machine, *, is_stack: bool, M: int, N: int, dtype: torch.dtype, device: torch.device
) -> tuple[SyrkKernels | None, list[Unmet]]:
    """Look for the kernel for a stack (or one matrix) of M x N on `device`.

    Returns:
        The kernels and an empty list, or None and every requirement that is not met.
    """
    unmet = _unmet_by_request(machine, M, N, dtype, device)
    version = machine.find_version(DISTRIBUTION)
    if version is None or not is_version_at_least(version, MINIMUM_VERSION):
        unmet.append(
            Unmet(f"{DISTRIBUTION} >= {MINIMUM_VERSION}", version or "no such package installed")
        )
        return None, unmet
    try:
        module = machine.import_module(MODULE)
    except ImportError as error:
        unmet.append(Unmet(f"{MODULE} of {DISTRIBUTION} {version} to import", str(error)))
        return None, unmet
    kernels, unmet_by_module = _kernels_of(module, version, is_stack)
    unmet += unmet_by_module
    return (None if unmet else kernels), unmet


def _unmet_by_request(
    machine: Machine, M: int, N: int, dtype: torch.dtype, device: torch.device
) -> list[Unmet]:
    unmet = []
    capability = machine.find_capability(device)
    if capability not in CAPABILITIES:
        known = ", ".join(f"{major}.{minor}" for major, minor in CAPABILITIES)
        found = device.type if capability is None else "{}.{}".format(*capability)
        unmet.append(Unmet(f"a GPU of compute capability {known}", found))
    if dtype != torch.bfloat16:
        unmet.append(Unmet("optim.ns_dtype=bfloat16", str(dtype).removeprefix("torch.")))
    if M % ALIGNMENT or N % ALIGNMENT:
        unmet.append(Unmet(f"rows and columns that are multiples of {ALIGNMENT}", f"{M}x{N}"))
    return unmet


def _kernels_of(
    module: ModuleType, version: str, is_stack: bool
) -> tuple[SyrkKernels, list[Unmet]]:
    names = vars(module)
    batched = names.get("batched_tsyrk_ex") if is_stack else None
    if batched is not None and _takes(batched, ("alpha", "beta", "out")):
        kernels, unmet = SyrkKernels(None, batched), []
    else:
        single = names.get("tsyrk_ex")
        kernels, unmet = SyrkKernels(single, None), _unmet_by_single(single, version)
    if not names.get("HAS_TRITON_340", False):
        unmet.append(Unmet("Triton >= 3.4.0 (tensor descriptors)", "HAS_TRITON_340 is not set"))
    return kernels, unmet


def _unmet_by_single(single: Kernel | None, version: str) -> list[Unmet]:
    if single is None:
        return [Unmet(f"{MODULE}.tsyrk_ex", f"no such kernel in {version}")]
    if not _takes(single, ("alpha", "beta")):
        found = f"{version} has tsyrk_ex{inspect.signature(single)}"
        return [Unmet("tsyrk_ex to take alpha and beta", found)]
    return []


def _takes(kernel: Kernel, arguments: tuple[str, ...]) -> bool:
    return set(arguments) <= set(inspect.signature(kernel).parameters)


def syrk_products(kernels: SyrkKernels) -> Products:
    """Return products whose symmetric half runs on the SYRK kernel; X is multiplied by torch.

    `symmetric` serves the standard step alone, where both operands are the same matrix.
    """
    run = partial(_run_batched, kernels.batched) if kernels.batched is not None else None
    if run is None:
        assert kernels.single is not None, "the gate admits a stack only with one of the kernels"
        run = partial(_run_loop, kernels.single)
    return Products(
        gram=partial(_syrk_gram, run),
        symmetric=partial(_syrk_symmetric, run),
        apply=torch_apply,
        shift=add_identity,
        halves_symmetric=True,
    )


RunSyrk = Callable[[Tensor, Tensor | None, float, float, Tensor], None]


def _syrk_gram(run: RunSyrk, X_BMN: Tensor, out_BMM: Tensor) -> None:
    run(X_BMN, None, 1.0, 0.0, out_BMM)


def _syrk_symmetric(
    run: RunSyrk,
    A_BMM: Tensor,
    Z_BMM: Tensor,
    C_BMM: Tensor,
    alpha: float,
    beta: float,
    out_BMM: Tensor,
) -> None:
    assert A_BMM is Z_BMM, "SYRK multiplies a matrix by its own transpose only"
    run(A_BMM, C_BMM, alpha, beta, out_BMM)


def _run_batched(
    kernel: Kernel, A_BMK: Tensor, C_BMM: Tensor | None, alpha: float, beta: float, out_BMM: Tensor
) -> None:
    record_launch("emerging_optimizers.batched_tsyrk_ex")
    kernel(A_BMK, C_BMM, alpha=alpha, beta=beta, out=out_BMM)


def _run_loop(
    kernel: Kernel, A_BMK: Tensor, C_BMM: Tensor | None, alpha: float, beta: float, out_BMM: Tensor
) -> None:
    for index in range(A_BMK.shape[0]):
        record_launch("emerging_optimizers.tsyrk_ex")
        addend = None if C_BMM is None else C_BMM[index]
        out_BMM[index] = kernel(A_BMK[index], addend, alpha=alpha, beta=beta)
