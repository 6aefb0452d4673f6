"""Starting and finishing collectives.

Owns the launch on a stream of its own and the lifetime of buffers: nothing handed to a collective
is freed before its wait, unless the step fails in between. The groups are `process_groups.py`'s,
what the bytes mean is in `wire.py`, when to launch is `pipeline.py`'s.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.clock import Mark
from trainer.optim.timing import PhaseTimer

try:
    from torch.distributed import all_gather_single as all_gather
except ImportError:  # torch before 2.13, whose name for it later versions deprecate
    from torch.distributed import all_gather_into_tensor as all_gather


@dataclass
class Transfer:
    """A collective under way, with every buffer it touches."""

    work: dist.Work | None
    output: Tensor
    inputs: Tensor
    start: Mark
    stop: Mark | None


class Exchange:
    """Launches and awaits collectives, off the compute stream on a GPU."""

    def __init__(self, device: torch.device, timer: PhaseTimer) -> None:
        self._timer = timer
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.num_launched = 0
        """Collectives launched so far."""

    def launch_all_to_all(
        self,
        send: Tensor,
        send_sizes: Sequence[int],
        receive_sizes: Sequence[int],
        group: dist.ProcessGroup,
    ) -> Transfer:
        """Start sending consecutive parts of a flat buffer to the ranks of a group.

        Args:
            send: 1-D, contiguous.
            send_sizes: Elements for each rank.
            receive_sizes: Elements from each rank.
            group: Who takes part.

        Collective: all-to-all on `group`; all its ranks call, in plan order.
        """
        output = send.new_empty(sum(receive_sizes))
        sizes = list(receive_sizes), list(send_sizes)
        collective = partial(dist.all_to_all_single, output, send, *sizes)
        return self._launch(collective, output, send, group)

    def launch_all_gather(self, part: Tensor, group: dist.ProcessGroup) -> Transfer:
        """Start gathering equal 1-D parts from all ranks of a group, in rank order.

        Collective: all-gather on `group`; all its ranks call, in plan order.
        """
        output = part.new_empty(part.numel() * group.size())
        return self._launch(partial(all_gather, output, part), output, part, group)

    def _launch(
        self,
        collective: Callable[..., dist.Work | None],
        output: Tensor,
        inputs: Tensor,
        group: dist.ProcessGroup,
    ) -> Transfer:
        """Start a collective behind what the compute stream has been given so far.

        Collective: the one given, on `group`; all its ranks call, in plan order.
        """
        self.num_launched += 1
        if self._stream is None:
            begun = self._timer.mark()
            return Transfer(collective(group=group, async_op=True), output, inputs, begun, None)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            begun = self._timer.mark()
            work = collective(group=group, async_op=True)
            if work is not None:
                work.wait()  # the side stream waits, not the host
            return Transfer(None, output, inputs, begun, self._timer.mark())

    def wait(self, transfer: Transfer) -> Tensor:
        """Finish a transfer and return what was received; its input buffer may go.

        On a CPU its time runs from launch to here, an upper bound.
        """
        waiting = self._timer.mark()
        if isinstance(transfer.stop, torch.cuda.Event):
            # This transfer's end only: later ones are still to overlap with what follows.
            torch.cuda.current_stream().wait_event(transfer.stop)
        elif transfer.work is not None:
            transfer.work.wait()
        done = self._timer.mark()
        self._timer.add("exchange_exposed", waiting, done)
        self._timer.add("exchange", transfer.start, transfer.stop or done)
        return transfer.output
