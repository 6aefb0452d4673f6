"""The gate before every update: a device flag says whether the step's numbers are finite.

Owns the flag's way to the host, one step late and without a wait in between. The optimizers apply
the flag with `where` on the device and take their host counters back in `settle`.
"""

import torch
from torch import Tensor


class FiniteGate:
    """Remembers the last step's flag until the host asks for it."""

    def __init__(self) -> None:
        self._host_flag: Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        self._was_applied = True

    def record(self, finite: Tensor | None) -> None:
        """Start copying a step's flag to the host.

        Args:
            finite: 0-d bool, equal on all ranks; None: the step is applied unseen.
        """
        self._was_applied, self._copied, self._host_flag = True, None, None
        if finite is None:
            return
        if finite.device.type != "cuda":
            self._host_flag = finite.detach().clone()
            return
        self._host_flag = torch.empty((), dtype=torch.bool, pin_memory=True)
        self._host_flag.copy_(finite, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    @property
    def is_pending(self) -> bool:
        """Whether a flag was recorded and not yet read."""
        return self._host_flag is not None

    def settle(self) -> bool:
        """Wait for the last flag and return whether that step was applied."""
        if self._host_flag is not None:
            if self._copied is not None:
                self._copied.synchronize()
            self._was_applied = bool(self._host_flag)
            self._host_flag, self._copied = None, None
        return self._was_applied
