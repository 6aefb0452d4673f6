"""Agreement on gradients that some ranks lack.

The rule is what a single process would do: a parameter without a gradient on every rank is left
alone, momentum, decay and all; one with a gradient anywhere is updated everywhere, ranks without
one counting zeros. A rank that has a gradient knows the answer; only a rank that lacks one reads
the others', on the device.

Ranks that hold copies of one shard must all have its gradient or all lack it, as FSDP and DDP leave
it: a copy cannot be told from zeros without sending it. FSDP2 itself needs a gradient on all ranks
or none.

Owns the one small all-reduce a step that this takes, on each set of ranks that share meshes.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from trainer.optim.exchange import ranks_group, warm
from trainer.optim.spec import MeshSpec, ParameterSpec


class Presence:
    """Which parameters have a gradient on any rank, agreed in the background of the step."""

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        meshes: dict[MeshSpec, DeviceMesh],
        device: torch.device,
    ) -> None:
        """Find the sets of ranks to agree within.

        Collective: group creation and warming, one for each set of ranks, in order of first use.
        """
        self._device = device
        members: dict[tuple[int, ...], list[int]] = {}
        for index, spec in enumerate(specs):
            if spec.mesh is not None:
                ranks = tuple(sorted(meshes[spec.mesh].mesh.flatten().tolist()))
                if len(ranks) > 1:
                    members.setdefault(ranks, []).append(index)
        self._sets: list[tuple[dist.ProcessGroup, list[int]]] = []
        for ranks, indices in members.items():
            group = ranks_group(ranks)
            warm(group, device.type)
            self._sets.append((group, indices))
        self._places = {
            index: (s, place)
            for s, (_, indices) in enumerate(self._sets)
            for place, index in enumerate(indices)
        }
        self._flags: list[Tensor] = []
        self._works: list[dist.Work | None] = []

    @property
    def num_collectives(self) -> int:
        """All-reduces a step."""
        return len(self._sets)

    @property
    def first_group(self) -> dist.ProcessGroup | None:
        """The ranks of the first parameter's mesh; None: this rank alone."""
        return self._sets[0][0] if self._sets else None

    def launch(self, has_gradient: Sequence[bool]) -> None:
        """Start agreeing.

        Args:
            has_gradient: For each parameter, whether this rank has its gradient.

        Collective: one all-reduce (max) on each set of ranks; every rank of the meshes.
        """
        self._flags, self._works = [], []
        for group, indices in self._sets:
            here = torch.tensor([has_gradient[i] for i in indices], dtype=torch.int32)
            if self._device.type == "cuda":
                here = here.pin_memory().to(self._device, non_blocking=True)
            self._works.append(dist.all_reduce(here, dist.ReduceOp.MAX, group=group, async_op=True))
            self._flags.append(here)

    def wait(self) -> None:
        """Finish agreeing; the step calls it even when it needs no answer."""
        for work in self._works:
            if work is not None:
                work.wait()
        self._works = []

    def somewhere(self, index: int) -> Tensor | None:
        """Return whether any rank has a parameter's gradient: 0-d bool; None: no other rank to ask.

        Waits on the device (CPU: on the host) for the agreement.
        """
        if index not in self._places:
            return None
        self.wait()
        flags, place = self._places[index]
        return self._flags[flags][place] > 0
