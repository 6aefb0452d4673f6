"""The gate before every update: a device flag says whether the step's numbers are finite.

Owns the flag's way to the host, one step late and without a wait in between. The optimizers apply
the flag with `where` on the device and take their host counters back in `settle`.
"""

from torch import Tensor

from trainer.clock import HostCopy


class FiniteGate:
    """Remembers the last step's flag until the host asks for it."""

    def __init__(self) -> None:
        self._flag: HostCopy | None = None
        self._was_applied = True

    def record(self, finite: Tensor | None) -> None:
        """Start copying a step's flag to the host.

        Args:
            finite: 0-d bool, equal on all ranks; None: the step is applied unseen.
        """
        self._was_applied = True
        self._flag = None if finite is None else HostCopy(finite.detach())

    @property
    def is_pending(self) -> bool:
        """Whether a flag was recorded and not yet read."""
        return self._flag is not None

    def settle(self) -> bool:
        """Wait for the last flag and return whether that step was applied."""
        if self._flag is not None:
            self._was_applied = bool(self._flag.read())
            self._flag = None
        return self._was_applied
