"""Which kernel runs for a stack of matrices: a kernel asked for by name runs or refuses.

Owns `choose_kernel` and the thresholds of `auto`. `auto` may choose and says why; it never changes
the dtype, and takes only kernels that are at least as exact as `dense` in that dtype on the worst
of inputs.py. Read newton_schulz.py for where the choice is used.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from trainer.errors import UserError
from trainer.optim.kernels import quack_default, symmetric
from trainer.optim.kernels.gram import ASPECTS
from trainer.optim.kernels.machine import THIS_MACHINE, Capability, Machine
from trainer.optim.kernels.products import Products, torch_products
from trainer.optim.kernels.requirements import Unmet, refusal
from trainer.optim.kernels.syrk import find_syrk_kernels, syrk_products

KernelName = Literal["dense", "symmetric", "gram", "syrk"]
Shape = tuple[int, int, int]

NAMES = ("auto", "dense", "symmetric", "gram", "syrk")

_BROKEN_IMPORT = (ImportError, OSError, RuntimeError, AttributeError)
"""What a package raises that is missing, of another version, or of another driver's."""

MIN_SYMMETRIC_ROWS = 256
"""Below, `auto` stays dense: fewer than three tiles of 128 leave nothing to skip."""

MIN_GRAM_ASPECT = {torch.bfloat16: ASPECTS[0], torch.float16: ASPECTS[1]}
"""From here on `auto` takes Gram: it fuses rows, and only where that is as exact as dense. In
float16 at 1536x2048 it is not quite: 1.05 times dense's error on one large row, less elsewhere
(one H200, torch 2.11, quack-kernels 0.6.5, 2026-11-30, scripts/bench/newton_schulz.py)."""


@dataclass(frozen=True)
class KernelChoice:
    """One kernel for one shape, resolved.

    Attributes:
        name: what runs.
        reason: why, for the log and the plan.
        halves_symmetric: symmetric products cost half their FLOPs.
        load_products: imports the kernel's package and returns its products.
        fuses_update: its products have an `update`.
    """

    name: KernelName
    reason: str
    halves_symmetric: bool = False
    load_products: Callable[[], Products] = field(default=torch_products, repr=False, compare=False)
    fuses_update: bool = False


def choose_kernel(
    request: str,
    *,
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    machine: Machine = THIS_MACHINE,
) -> KernelChoice:
    """Resolve `optim.kernel` for a stack.

    Args:
        request: one of `NAMES`.
        shape: (B, M, N), M and N in either order.
        dtype: of the iteration; never changed.
        device: where it will run.
        machine: what to ask about packages and GPUs; another one to plan for another machine.

    Raises:
        UserError: an unknown name, or a kernel asked for that cannot run here, with what it needs,
            what was found and the ways out.
    """
    match request:
        case "auto":
            return _choose(shape, dtype, device, machine)
        case "dense":
            return KernelChoice("dense", "asked for")
        case "symmetric":
            return _asked_for_symmetric(shape, dtype, device, machine)
        case "gram":
            return _asked_for_gram(shape, dtype, device, machine)
        case "syrk":
            return _asked_for_syrk(shape, dtype, device, machine)
    raise UserError(f'optim.kernel="{request}": not a kernel; give one of {", ".join(NAMES)}')


def _choose(
    shape: Shape, dtype: torch.dtype, device: torch.device, machine: Machine
) -> KernelChoice:
    capability = machine.find_capability(device)
    if capability is None:
        return KernelChoice("dense", f"on {device.type} nothing is faster")
    if dtype not in symmetric.SUPPORTED_DTYPES:
        name = str(dtype).removeprefix("torch.")
        return KernelChoice("dense", f"{name} has no symmetric kernel")
    if capability[0] != symmetric.HOPPER:
        return KernelChoice("dense", "the symmetric kernel is measured on Hopper alone")
    unmet = _unmet_by_quack(shape, dtype, device, machine)
    if unmet:
        need, found = unmet[0]
        return KernelChoice("dense", f"the symmetric kernel needs {need}, found {found}")
    shorter, longer = sorted(shape[1:])
    if shorter < MIN_SYMMETRIC_ROWS:
        return KernelChoice("dense", f"matrices under {MIN_SYMMETRIC_ROWS} have little to halve")
    if longer >= MIN_GRAM_ASPECT[dtype] * shorter:
        reason = f"aspect ratio {longer / shorter:.3g} is at least {MIN_GRAM_ASPECT[dtype]:.3g}"
        return _of_quack("gram", reason, capability)
    reason = f"half the symmetric products; aspect ratio {longer / shorter:.3g} is too low for gram"
    return _of_quack("symmetric", reason, capability)


def _of_quack(name: KernelName, reason: str, capability: Capability) -> KernelChoice:
    return KernelChoice(
        name,
        reason,
        halves_symmetric=True,
        load_products=partial(symmetric.quack_products, capability),
        fuses_update=capability[0] == symmetric.HOPPER,
    )


def _asked_for_symmetric(
    shape: Shape, dtype: torch.dtype, device: torch.device, machine: Machine
) -> KernelChoice:
    unmet = _unmet_by_quack(shape, dtype, device, machine)
    capability = machine.find_capability(device)
    if unmet or capability is None:
        way_out = "meet these needs (pip install 'trainer[gpu]'; optim.ns_dtype=\"bfloat16\")"
        raise refusal("symmetric", shape, dtype, unmet, way_out)
    return _of_quack("symmetric", "asked for", capability)


def _asked_for_gram(
    shape: Shape, dtype: torch.dtype, device: torch.device, machine: Machine
) -> KernelChoice:
    capability = machine.find_capability(device)
    unmet = _unmet_by_quack(shape, dtype, device, machine)
    if unmet or capability is None:
        return KernelChoice("gram", f"asked for; with torch's products ({unmet[0].need} missing)")
    return _of_quack("gram", "asked for; with QuACK's products", capability)


def _asked_for_syrk(
    shape: Shape, dtype: torch.dtype, device: torch.device, machine: Machine
) -> KernelChoice:
    num_matrices, M, N = shape
    kernels, unmet = find_syrk_kernels(
        machine, is_stack=num_matrices > 1, M=M, N=N, dtype=dtype, device=device
    )
    if kernels is None:
        way_out = "install what is missing (git+https://github.com/NVIDIA-NeMo/Emerging-Optimizers)"
        if dtype != torch.bfloat16:
            way_out += ' and set optim.ns_dtype="bfloat16"'
        raise refusal("syrk", shape, dtype, unmet, way_out)
    is_loop = num_matrices > 1 and kernels.batched is None
    reason = "asked for; one matrix after another, as its batched kernel is missing"
    return KernelChoice(
        "syrk", reason if is_loop else "asked for", True, partial(syrk_products, kernels)
    )


def _unmet_by_quack(
    shape: Shape, dtype: torch.dtype, device: torch.device, machine: Machine
) -> list[Unmet]:
    _, M, N = shape
    capability = machine.find_capability(device)
    unmet = []
    if not _is_supported(capability):
        found = device.type if capability is None else "{}.{}".format(*capability)
        unmet.append(Unmet("a CUDA GPU of compute capability 8 to 12", found))
    if dtype not in symmetric.SUPPORTED_DTYPES:
        unmet.append(Unmet("float16 or bfloat16", str(dtype).removeprefix("torch.")))
    if M % symmetric.ALIGNMENT or N % symmetric.ALIGNMENT:
        need = f"rows and columns that are multiples of {symmetric.ALIGNMENT}"
        unmet.append(Unmet(need, f"{M}x{N}"))
    if not unmet:
        unmet += _unmet_by_package(machine, capability)
    return unmet


def _is_supported(capability: Capability | None) -> bool:
    return capability is not None and capability[0] in symmetric.SUPPORTED_MAJOR_CAPABILITIES


def _unmet_by_package(machine: Machine, capability: Capability | None) -> list[Unmet]:
    is_hopper = capability is not None and capability[0] == symmetric.HOPPER
    try:
        for name in symmetric.MODULES if is_hopper else quack_default.MODULES:
            machine.import_module(name)
    except _BROKEN_IMPORT as error:
        version = machine.find_version("quack-kernels") or "none"
        return [Unmet("quack-kernels (extra `gpu`)", f"{error} (version: {version})")]
    return []
