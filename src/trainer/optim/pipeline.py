"""One Muon step over stacks: momentum, exchange in, orthogonalize, exchange out, apply.

Owns the carrying out of a plan; the elementwise passes are in `chunk_passes.py`. Chunks follow one
another through the phases like this, so that a chunk's exchanges run while its neighbours are
orthogonalized:

    tick      momentum + exchange in   orthogonalize + exchange out   share   apply
      t            chunk t                     chunk t-1               t-2     t-3

A chunk that needs no exchange is applied at t-2, or within its last product (`weight_targets.py`).
Every rank launches in the same order, also where it has nothing to do in a chunk.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from trainer.optim.chunk_passes import (
    apply_chunk_update_,
    pack_share,
    stack_share,
    update_chunk_momentum_,
)
from trainer.optim.exchange import Exchange
from trainer.optim.flight import Flight, StepInputs, find_runs, slab_shapes
from trainer.optim.kernels import matrix_table
from trainer.optim.kernels.matrix_table import MatrixTable, TableLayout
from trainer.optim.kernels.products import Target
from trainer.optim.kernels.select import KernelChoice
from trainer.optim.plan import Plan
from trainer.optim.process_groups import BucketGroups
from trainer.optim.state import local
from trainer.optim.timing import PhaseTimer
from trainer.optim.weight_targets import find_targets
from trainer.optim.wire import TAIL, unpack

NS_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class Orthogonalize(Protocol):
    """Orthogonalizes stacks with the kernels of their buckets."""

    def __call__(
        self,
        stack_BMN: Tensor,
        kernel: KernelChoice,
        *,
        is_normalized: bool,
        targets: Sequence[Target] | None,
    ) -> Tensor | None:
        """Return the orthogonalization of a stack, same shape and dtype; None if targets took it.

        Args:
            stack_BMN: Contiguous; overwritten if it is normalized.
            kernel: That of its bucket.
            is_normalized: Whether every matrix has been divided by its Frobenius norm.
            targets: Weights that take the update as it is made.
        """
        ...


class StackedStep:
    """Carries out a plan, step after step."""

    def __init__(
        self,
        plan: Plan,
        groups: Sequence[BucketGroups],
        exchange: Exchange,
        timer: PhaseTimer,
        kernels: Sequence[KernelChoice],
        orthogonalize: Orthogonalize,
    ) -> None:
        self._plan = plan
        self._kernels = kernels
        self._groups = groups
        self._exchange = exchange
        self._timer = timer
        self._orthogonalize = orthogonalize
        self._layouts: dict[tuple[int, int, int], TableLayout | None] = {}
        self._dtype = NS_DTYPES[plan.options.ns_dtype]

    def run(self, inputs: StepInputs, meanwhile: Callable[[], None]) -> None:
        """Update momentum and weights of all bucketed parameters.

        Args:
            inputs: What to update.
            meanwhile: Other work of the step; the host prepares it halfway through, when the
                device has enough to do.

        Collective: the plan's exchanges, in slot order; all ranks of the plan's meshes.
        """
        stages = (self._enter, self._turn, self._share, self._finish)
        flights: dict[int, Flight] = {}
        num_slots = len(self._plan.slots)
        num_ticks = num_slots + len(stages) - 1
        for tick in range(num_ticks):
            if tick < num_slots:
                # Not before: until its first kernel the device waits for the host.
                flights[tick] = self._flight(*self._plan.slots[tick])
            for lag, stage in enumerate(stages):
                if 0 <= tick - lag < num_slots:
                    stage(flights[tick - lag], inputs)
            flights.pop(tick - len(stages) + 1, None)
            if tick == num_ticks // 2:
                meanwhile()

    def _find_table(self, flight: Flight, inputs: StepInputs) -> MatrixTable | None:
        """Return where a chunk's matrices lie; None where kernels that walk a table cannot run."""
        if matrix_table.find_kernels(inputs.parameters[0].device.type) is None:
            return None
        place = (flight.index, flight.chunk.start, flight.chunk.stop)
        if place not in self._layouts:
            runs = find_runs(flight, inputs)
            self._layouts[place] = TableLayout(runs) if runs else None
        layout = self._layouts[place]
        if layout is None:
            return None
        parameters = [inputs.parameters[index] for index in layout.parameters]
        return layout.table(
            [None if p.grad is None else local(p.grad) for p in parameters],
            [local(inputs.momentum(index)) for index in layout.parameters],
            [local(parameter) for parameter in parameters],
            [inputs.gates[index] for index in layout.parameters],
        )

    def _flight(self, b: int, c: int) -> Flight:
        bucket = self._plan.buckets[b]
        chunk = bucket.chunks[c]
        before = sum(bucket.share(chunk, replica) for replica in range(bucket.replica_rank))
        first = chunk.start + before
        share = first, first + bucket.share(chunk, bucket.replica_rank)
        return Flight(b, bucket, self._groups[b], chunk, share)

    def _enter(self, flight: Flight, inputs: StepInputs) -> None:
        flight.table = self._find_table(flight, inputs)
        self._update_momentum(flight, inputs)
        if flight.bucket.is_exchanged:
            self._launch_in(flight, inputs)
        else:
            self._stack_share(flight, inputs)

    def _turn(self, flight: Flight, inputs: StepInputs) -> None:
        self._wait_in(flight)
        self._orthogonalize_stack(flight, inputs)
        self._launch_out(flight)

    def _share(self, flight: Flight, inputs: StepInputs) -> None:
        if flight.bucket.is_exchanged:
            self._wait_out(flight)
            self._launch_share(flight, inputs)
        else:
            self._apply(flight, inputs)

    def _finish(self, flight: Flight, inputs: StepInputs) -> None:
        if flight.bucket.is_exchanged:
            self._apply(flight, inputs)

    # Momentum.

    def _update_momentum(self, flight: Flight, inputs: StepInputs) -> None:
        with self._timer.measure("momentum"):
            update_chunk_momentum_(flight, inputs)

    def _stack_share(self, flight: Flight, inputs: StepInputs) -> None:
        """Build the stack of whole matrices that this rank orthogonalizes."""
        if flight.share_size:
            with self._timer.measure("momentum"):
                flight.stack_BMN = stack_share(flight, inputs, self._dtype)

    # Exchange in.

    def _launch_in(self, flight: Flight, inputs: StepInputs) -> None:
        """Send this rank's slabs to the owners of their matrices; start receiving owned ones.

        Collective: all-to-all over the bucket's split axis.
        """
        bucket, shards = flight.bucket, flight.groups.shards
        if shards is None:
            self._stack_share(flight, inputs)
            return
        if not flight.share_size:
            return
        with self._timer.measure("momentum"):
            message = pack_share(flight, inputs, self._dtype)
        owned = bucket.owned_by_replica(flight.chunk, bucket.replica_rank)
        here = bucket.owned_here(flight.chunk)
        flight.transfer = self._exchange.launch_all_to_all(
            message.flatten(),
            [count * message.shape[1] for count in owned],
            [here * (rows * cols + TAIL) for rows, cols in slab_shapes(bucket)],
            shards,
        )

    def _wait_in(self, flight: Flight) -> None:
        if flight.transfer is None:
            return
        bucket, shapes = flight.bucket, slab_shapes(flight.bucket)
        received = self._exchange.wait(flight.transfer)
        flight.transfer = None
        here = bucket.owned_here(flight.chunk)
        with self._timer.measure("momentum"):
            parts = received.split([here * (rows * cols + TAIL) for rows, cols in shapes])
            blocks = [
                part.view(here, rows * cols + TAIL)
                for part, (rows, cols) in zip(parts, shapes, strict=True)
            ]
            flight.stack_BMN = unpack(blocks, shapes, bucket.split_dim)

    # Orthogonalize.

    def _orthogonalize_stack(self, flight: Flight, inputs: StepInputs) -> None:
        stack_BMN, bucket = flight.stack_BMN, flight.bucket
        if stack_BMN is None:
            return
        update_BMN: Tensor | None = stack_BMN
        if len(stack_BMN):
            kernel = self._kernels[flight.index]
            targets = find_targets(flight, inputs, kernel)
            with self._timer.measure("newton_schulz"):
                update_BMN = self._orthogonalize(
                    stack_BMN, kernel, is_normalized=flight.is_normalized, targets=targets
                )
            if inputs.stats is not None and update_BMN is not None:
                inputs.stats.observe(bucket.group, update_BMN, bucket.lr_scale)
        flight.stack_BMN, flight.update_BMN = None, update_BMN

    # Exchange out.

    def _launch_out(self, flight: Flight) -> None:
        """Send each rank its slabs of the matrices orthogonalized here.

        Collective: all-to-all over the bucket's split axis.
        """
        bucket, shards, owned_BMN = flight.bucket, flight.groups.shards, flight.update_BMN
        if shards is None or owned_BMN is None:
            return
        slabs = owned_BMN.split(list(bucket.slab_sizes), dim=1 + bucket.split_dim)
        rows, cols = bucket.local_matrix_shape
        owned = bucket.owned_by_replica(flight.chunk, bucket.replica_rank)
        flight.transfer = self._exchange.launch_all_to_all(
            torch.cat([slab.flatten() for slab in slabs]),
            [slab.numel() for slab in slabs],
            [count * rows * cols for count in owned],
            shards,
        )
        flight.update_BMN = None

    def _wait_out(self, flight: Flight) -> None:
        if flight.transfer is not None:
            received = self._exchange.wait(flight.transfer)
            flight.transfer = None
            flight.update_BMN = received.view(flight.share_size, *flight.bucket.local_matrix_shape)

    def _launch_share(self, flight: Flight, inputs: StepInputs) -> None:
        """Give the other replicas the updates of this replica's share.

        Collective: all-gather over the bucket's replica axes.
        """
        bucket, replicas = flight.bucket, flight.groups.replicas
        rows, cols = bucket.local_matrix_shape
        if replicas is None or flight.chunk.start == flight.chunk.stop or not rows * cols:
            return
        largest = max(bucket.share(flight.chunk, r) for r in range(bucket.num_replicas))
        like = local(inputs.parameters[bucket.pieces[0].parameter])
        part_BMN = like.new_empty(largest, rows, cols, dtype=self._dtype)
        if flight.update_BMN is not None:
            part_BMN[: len(flight.update_BMN)] = flight.update_BMN
            flight.update_BMN = None
        flight.transfer = self._exchange.launch_all_gather(part_BMN.flatten(), replicas)

    # Apply.

    def _apply(self, flight: Flight, inputs: StepInputs) -> None:
        for first, update_BMN in self._received_updates(flight):
            if len(update_BMN):
                with self._timer.measure("update"):
                    apply_chunk_update_(flight, first, update_BMN, inputs)
        # What a chunk held goes now, before the next one's stage.
        flight.update_BMN = flight.table = flight.kept_BP = None

    def _received_updates(self, flight: Flight) -> list[tuple[int, Tensor]]:
        """Return (first matrix, updates [local_B, local rows, local cols]), by replica."""
        bucket, chunk = flight.bucket, flight.chunk
        if flight.groups.replicas is None:
            return [] if flight.update_BMN is None else [(chunk.start, flight.update_BMN)]
        if flight.transfer is None:
            return []
        received = self._exchange.wait(flight.transfer)
        flight.transfer = None
        received_RBMN = received.view(bucket.num_replicas, -1, *bucket.local_matrix_shape)
        updates, first = [], chunk.start
        for replica, update_BMN in enumerate(received_RBMN):
            share = bucket.share(chunk, replica)
            updates.append((first, update_BMN[:share]))
            first += share
        return updates
