"""What this machine has: packages, versions, GPU capability; asked lazily, and replaceable.

Owns the `Machine` value that kernel selection asks. Selection itself is in select.py; a plan for
a GPU that is not here, and tests of every branch, pass another `Machine`.
"""

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

Capability = tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """Three questions, each answered only when asked.

    Attributes:
        find_version: distribution name -> its version, or None where it is not installed.
        import_module: module name -> the module; raises ImportError.
        find_capability: device -> CUDA compute capability, or None for anything else.
    """

    find_version: Callable[[str], str | None]
    import_module: Callable[[str], ModuleType]
    find_capability: Callable[[torch.device], Capability | None]


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpu_capability(device: torch.device) -> Capability | None:
    """Return the compute capability of a CUDA device, or None for another device."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_capability(device)


THIS_MACHINE = Machine(installed_version, importlib.import_module, gpu_capability)


def assumed_machine(capability: Capability | None) -> Machine:
    """Return a machine whose GPU has `capability` and where every package imports.

    For planning a run on a GPU that this machine does not have: kernels can be chosen with it,
    not run.
    """
    return Machine(
        find_version=lambda _: None,
        import_module=ModuleType,
        find_capability=lambda _: capability,
    )
