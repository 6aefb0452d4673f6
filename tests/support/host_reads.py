"""Notices when the host reads a number of a tensor, which on a GPU waits for all that is queued."""

from torch.utils._python_dispatch import TorchDispatchMode

READS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal")
"""Operators of aten whose result the host needs before it can go on."""


class HostReads(TorchDispatchMode):
    """Collects the names of operators that read, while it is entered."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in READS:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))
