"""Agreement on gradients that some ranks lack.

The rule is what a single process would do: a parameter without a gradient on every rank is left
alone, momentum, decay and all; one with a gradient anywhere is updated everywhere, ranks without
one counting zeros. A rank that has a gradient knows the answer; only a rank that lacks one reads
the others', on the device.

Ranks that hold copies of one shard (an axis replicates the parameter) are one place of a single
process, which either has the gradient or has not. Where some copies have it and others lack it
there is no such process, and updating would let the copies part for good: the step is refused, on
all ranks of the mesh, before anything is written, and the next `settle` says so by name. FSDP and
DDP leave gradients on all copies or none, so only hand-made ones come to this.

Owns the carrying out of the plan's agreements (`agreement.py`): one small all-reduce a step over
all ranks, one more for each kind of copies before it, nothing read by the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from trainer.errors import UserError
from trainer.optim.agreement import Agreement, Agreements
from trainer.optim.process_groups import axes_group, warm
from trainer.optim.spec import MeshSpec
from trainer.optim.state import local


@dataclass(frozen=True)
class _Circle:
    """The ranks of an agreement, and where its parameters stand in the list of all."""

    group: dist.ProcessGroup
    parameters: tuple[int, ...]
    parameters_P: Tensor


class Presence:
    """Which parameters have a gradient on any rank, agreed in the background of the step."""

    def __init__(
        self,
        agreements: Agreements,
        meshes: dict[MeshSpec, DeviceMesh],
        named_parameters: Sequence[tuple[str, Tensor]],
    ) -> None:
        """Make and warm the groups.

        Args:
            agreements: Who agrees on what.
            meshes: The mesh of each description.
            named_parameters: All parameters, as the agreements count them; at least one.

        Collective: group creation and warming, one for each agreement, in order.
        """
        self._names = [name for name, _ in named_parameters]
        shards = [local(parameter) for _, parameter in named_parameters]
        # Copies of an empty shard have nothing to differ in.
        self._is_empty = [shard.numel() == 0 for shard in shards]
        self._device = shards[0].device
        self._copies = [self._circle(agreement, meshes) for agreement in agreements.copies]
        self._meshes = [self._circle(agreement, meshes) for agreement in agreements.meshes]
        self._shared = {index for circle in self._meshes for index in circle.parameters}
        self._has_gradient: Sequence[bool] = ()
        self._works: list[dist.Work | None] = []
        # Rows: whether any rank has the gradient; whether any copies differ in that.
        self._agreed_2P: list[Tensor] = []

    def _circle(self, agreement: Agreement, meshes: dict[MeshSpec, DeviceMesh]) -> _Circle:
        """Make the group of an agreement.

        Collective: group creation and warming; its ranks.
        """
        mesh = meshes[agreement.mesh]
        group = axes_group(mesh, agreement.axes)
        warm(group, mesh.device_type)
        places = torch.tensor(agreement.parameters, device=self._device)
        return _Circle(group, agreement.parameters, places)

    @property
    def widest_group(self) -> dist.ProcessGroup | None:
        """The ranks of the mesh that has most of them; None: this rank alone."""
        groups = [circle.group for circle in self._meshes]
        return max(groups, key=lambda group: group.size(), default=None)

    def launch(self, has_gradient: Sequence[bool]) -> None:
        """Start agreeing.

        Args:
            has_gradient: For each parameter, whether this rank has its gradient.

        Collective: one all-reduce (max) for each agreement of the plan, copies' first; every rank
        of the meshes.
        """
        self._has_gradient, self._agreed_2P, self._works = has_gradient, [], []
        if not self._meshes:
            return
        mixed_P = torch.zeros(len(has_gradient), dtype=torch.int32, device=self._device)
        for circle in self._copies:
            mixed_P[circle.parameters_P] = self._differs(circle, has_gradient)
        for circle in self._meshes:
            has_P = self._to_device([[has_gradient[i] for i in circle.parameters]])
            agreed_2P = torch.cat([has_P, mixed_P[None, circle.parameters_P]])
            work = dist.all_reduce(agreed_2P, dist.ReduceOp.MAX, group=circle.group, async_op=True)
            self._agreed_2P.append(agreed_2P)
            self._works.append(work)

    def _differs(self, circle: _Circle, has_gradient: Sequence[bool]) -> Tensor:
        """Return, for each parameter, whether some copies have a gradient and some lack it.

        Collective: all-reduce (max) over the circle; the device waits, not the host.
        """
        filled = [(i, not self._is_empty[i]) for i in circle.parameters]
        has = [has_gradient[i] and is_filled for i, is_filled in filled]
        lacks = [not has_gradient[i] and is_filled for i, is_filled in filled]
        both_2P = self._to_device([has, lacks])
        dist.all_reduce(both_2P, dist.ReduceOp.MAX, group=circle.group)
        return both_2P.amin(0)

    def _to_device(self, rows: list[list[bool]]) -> Tensor:
        if all(map(all, rows)):
            # The usual case, without a copy from the host.
            shape = len(rows), len(rows[0])
            return torch.ones(shape, dtype=torch.int32, device=self._device)
        host = torch.tensor(rows, dtype=torch.int32)
        if self._device.type != "cuda":
            return host
        return host.pin_memory().to(self._device, non_blocking=True)

    def wait(self) -> None:
        """Finish agreeing; the step calls it even when it needs no answer.

        On the device; on a CPU the host waits.
        """
        for work in self._works:
            if work is not None:
                work.wait()
        self._works = []

    def gate_step(self, finite: Tensor | None) -> Tensor | None:
        """Return the whole step's gate, 0-d bool: it is finite and copies agree on gradients.

        Args:
            finite: 0-d bool; None: finite.

        Returns:
            None if nothing could close it.
        """
        if not self._copies:
            return finite
        self.wait()
        agreed = ~torch.cat([agreed_2P[1] for agreed_2P in self._agreed_2P]).any()
        return agreed if finite is None else finite & agreed

    def gate_parameters(self, is_open: Tensor | None) -> list[Tensor | None]:
        """Return each parameter's gate: the step's is open and some rank has the gradient.

        Args:
            is_open: From `gate_step`.

        Returns:
            0-d bools; None: open.
        """
        gates: list[Tensor | None] = [is_open] * len(self._has_gradient)
        if all(self._has_gradient):
            return gates
        self.wait()
        somewhere: dict[int, Tensor] = {}
        for circle, agreed_2P in zip(self._meshes, self._agreed_2P, strict=True):
            has_P = agreed_2P[0] > 0
            has_P = has_P if is_open is None else has_P & is_open
            somewhere.update(zip(circle.parameters, has_P.unbind(), strict=True))
        nowhere = torch.zeros((), dtype=torch.bool, device=self._device)
        for index, has_here in enumerate(self._has_gradient):
            if not has_here:
                gates[index] = somewhere.get(index, nowhere)
        return gates

    def may_be_elsewhere(self, index: int) -> bool:
        """Return whether other ranks may have the gradient of a parameter that lacks it here."""
        return index in self._shared

    def refuse_mixed(self) -> None:
        """Raise if the last step met copies that differ; reads the device.

        Raises:
            UserError: naming the parameters, on all ranks of their meshes.
        """
        mixed = [
            self._names[index]
            for circle, agreed_2P in zip(self._meshes, self._agreed_2P, strict=True)
            for index, is_mixed in zip(circle.parameters, agreed_2P[1].tolist(), strict=True)
            if is_mixed
        ]
        if mixed:
            others = f" and {len(mixed) - 1} more" if len(mixed) > 1 else ""
            raise UserError(
                f"parameter {mixed[0]}{others} had a gradient on some of the ranks that hold "
                "copies of one shard and none on others: the step was not taken, on any rank; "
                "leave the gradient on every copy, as FSDP and DDP do, or set it to None on all"
            )
