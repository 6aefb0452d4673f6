"""Machines that are not here: fake packages and GPUs for the tests of kernel selection."""

from types import ModuleType

import torch

from trainer.optim.kernels.machine import Machine

H200 = (9, 0)
CUDA = torch.device("cuda")


class Recorder:
    """A kernel stand-in that computes what SYRK computes and remembers how it was called."""

    def __init__(self):
        self.calls = []

    def single(self, a, c=None, alpha=1.0, beta=0.0, skip_upper_triangle=False):
        self.calls.append(("tsyrk_ex", tuple(a.shape), alpha, beta))
        product = alpha * (a.float() @ a.float().mT)
        return (product if c is None else product + beta * c.float()).to(a.dtype)

    def batched(self, a, c=None, alpha=1.0, beta=0.0, skip_upper_triangle=False, out=None):
        self.calls.append(("batched_tsyrk_ex", tuple(a.shape), alpha, beta))
        product = alpha * (a.float() @ a.float().mT)
        out.copy_(product if c is None else product + beta * c.float())
        return out


def module_of(**names):
    module = ModuleType("emerging_optimizers.triton_kernels")
    vars(module).update(names)
    return module


def fake_machine(*, capability=H200, version=None, module=None, error=None, asked=None):
    """A machine with one package version and one module; `asked` collects the questions."""
    asked = [] if asked is None else asked

    def find_version(distribution):
        asked.append(distribution)
        return version

    def import_module(name):
        asked.append(name)
        if error is not None:
            raise ImportError(error)
        return module if module is not None else ModuleType(name)

    return Machine(find_version, import_module, lambda _: capability)
