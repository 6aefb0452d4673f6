"""One Muon step over stacks: momentum, exchange in, orthogonalize, exchange out, apply.

Owns the carrying out of a plan. Chunks follow one another through the phases like this, so that a
chunk's exchanges and elementwise passes run while its neighbours are orthogonalized:

    tick      momentum + exchange in   orthogonalize + exchange out   share   apply
      t            chunk t                     chunk t-1               t-2     t-3

A chunk that needs no exchange is applied at t-2; its passes run in the background (background.py).
Every rank launches in the same order, also where it has nothing to do in a chunk.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.optim.background import Background
from trainer.optim.bucket import Bucket, Chunk, Segment
from trainer.optim.exchange import BucketGroups, Exchange, Transfer
from trainer.optim.kernels.matrix_table import MatrixTable, Run, TableLayout
from trainer.optim.passes import apply_updates_, directions, update_momentum_
from trainer.optim.plan import Plan
from trainer.optim.state import as_matrices, local
from trainer.optim.stats import UpdateStats
from trainer.optim.timing import PhaseTimer
from trainer.optim.wire import TAIL, build_stack, pack, unpack

NS_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class Orthogonalize(Protocol):
    """Orthogonalizes stacks by bucket."""

    def __call__(self, stack_BMN: Tensor, bucket: int, *, is_normalized: bool) -> Tensor:
        """Return the orthogonalization of a stack, same shape and dtype.

        Args:
            stack_BMN: Contiguous; overwritten if it is normalized.
            bucket: Index of its bucket.
            is_normalized: Whether every matrix has been divided by its Frobenius norm.
        """
        ...


@dataclass(frozen=True)
class StepInputs:
    """What a step reads and writes.

    Attributes:
        parameters: All parameters, as pieces count them.
        momenta: Their momentum, same order.
        groups: The param groups.
        gates: For each parameter, a 0-d bool that lets its update through; None: open.
        stats: Observes the updates; None on steps that are not asked for.
    """

    parameters: Sequence[Tensor]
    momenta: Sequence[Tensor]
    groups: Sequence[dict[str, Any]]
    gates: Sequence[Tensor | None]
    stats: UpdateStats | None


@dataclass
class _Flight:
    """A chunk under way: what it is, and what is being exchanged for it."""

    index: int
    bucket: Bucket
    groups: BucketGroups
    chunk: Chunk
    share: tuple[int, int]
    """First matrix of this replica's share, counted over the bucket, and one past the last."""
    table: MatrixTable | None = None
    """Where the chunk's matrices lie; None: they are passed over tensor by tensor."""
    num_programs: int | None = None
    """Multiprocessors for passes by table; None: all."""
    kept_BP: Tensor | None = None
    """What the pass over momentum kept of each matrix of the table."""
    transfer: Transfer | None = None
    stack_BMN: Tensor | None = None
    is_normalized: bool = False
    update_BMN: Tensor | None = None
    """Updates of this replica's share: slabs as held here."""

    @property
    def shared_lines(self) -> slice:
        """Lines of the table that are this replica's share."""
        return slice(self.share[0] - self.chunk.start, self.share[1] - self.chunk.start)

    @property
    def share_size(self) -> int:
        """Matrices of this replica's share."""
        return self.share[1] - self.share[0]


class StackedStep:
    """Carries out a plan, step after step."""

    def __init__(
        self,
        plan: Plan,
        groups: Sequence[BucketGroups],
        exchange: Exchange,
        timer: PhaseTimer,
        orthogonalize: Orthogonalize,
    ) -> None:
        self._plan = plan
        self._groups = groups
        self._exchange = exchange
        self._timer = timer
        self._orthogonalize = orthogonalize
        self._background = Background(exchange.device)
        self._layout: TableLayout | None = None
        self._dtype = NS_DTYPES[plan.options.ns_dtype]

    def run(self, inputs: StepInputs, meanwhile: Callable[[], None]) -> None:
        """Update momentum and weights of all bucketed parameters.

        Args:
            inputs: What to update.
            meanwhile: Other work of the step; runs while the first chunk is orthogonalized.

        Collective: the plan's exchanges, in slot order; all ranks of the plan's meshes.
        """
        # Sharing comes last in a tick: see background.py.
        stages = ((0, self._enter), (1, self._turn), (3, self._finish), (2, self._share))
        flights = [self._flight(*slot) for slot in self._plan.slots]
        for flight, table in zip(flights, self._tables(flights, inputs), strict=True):
            flight.table = table
        for tick in range(len(flights) + len(stages) - 1):
            self._background.tick()
            num_programs = self._background_programs(flights, tick)
            for lag, stage in stages:
                if 0 <= tick - lag < len(flights):
                    flight = flights[tick - lag]
                    flight.num_programs = None if flight.bucket.is_exchanged else num_programs
                    stage(flight, inputs)
            if tick == 1:
                meanwhile()
        if not flights:
            meanwhile()
        self._background.tick()

    def _tables(
        self, flights: Sequence[_Flight], inputs: StepInputs
    ) -> Sequence[MatrixTable | None]:
        weights = [local(parameter) for parameter in inputs.parameters]
        if self._layout is None:
            self._layout = TableLayout([_runs(flight, weights, inputs) for flight in flights])
        gradients = [None if p.grad is None else local(p.grad) for p in inputs.parameters]
        momenta = [local(momentum) for momentum in inputs.momenta]
        return self._layout.tables(gradients, momenta, weights, inputs.gates)

    def _flight(self, b: int, c: int) -> _Flight:
        bucket = self._plan.buckets[b]
        chunk = bucket.chunks[c]
        before = sum(bucket.share(chunk, replica) for replica in range(bucket.replica_rank))
        first = chunk.start + before
        share = first, first + bucket.share(chunk, bucket.replica_rank)
        return _Flight(b, bucket, self._groups[b], chunk, share)

    def _enter(self, flight: _Flight, inputs: StepInputs) -> None:
        if flight.bucket.is_exchanged:
            self._update_momentum(flight, inputs)
            self._launch_in(flight, inputs)
            return
        with self._beside(flight):
            self._update_momentum(flight, inputs)
            self._stack_share(flight, inputs)

    def _turn(self, flight: _Flight, inputs: StepInputs) -> None:
        self._wait_in(flight)
        self._orthogonalize_stack(flight, inputs)
        self._launch_out(flight)

    def _share(self, flight: _Flight, inputs: StepInputs) -> None:
        if flight.bucket.is_exchanged:
            self._wait_out(flight)
            self._launch_share(flight, inputs)
            return
        is_cautious = inputs.groups[flight.bucket.group]["cautious_wd"]
        with nullcontext() if is_cautious else self._beside(flight):
            self._apply(flight, inputs)

    def _finish(self, flight: _Flight, inputs: StepInputs) -> None:
        if flight.bucket.is_exchanged:
            self._apply(flight, inputs)

    def _beside(self, flight: _Flight) -> AbstractContextManager[None]:
        """Return where a chunk's passes run: in the background if they take no temporaries."""
        return nullcontext() if flight.table is None else self._background.running()

    def _background_programs(self, flights: Sequence[_Flight], tick: int) -> int | None:
        """Return how many programs passes may take: all where no long product runs beside them."""
        turning = tick - 1
        if not 0 <= turning < len(flights) or flights[turning].bucket.is_exchanged:
            return None
        return self._background.num_multiprocessors

    # Momentum.

    def _update_momentum(self, flight: _Flight, inputs: StepInputs) -> None:
        with self._timer.measure("momentum"):
            if flight.table is not None:
                flight.kept_BP = flight.table.update_momentum_(
                    **self._rule(flight, inputs),
                    num_programs=flight.num_programs,
                    keep="squares" if flight.groups.shards is None else "largest",
                )
                return
            segments = flight.bucket.segments(flight.chunk.start, flight.chunk.stop)
            group = inputs.groups[flight.bucket.group]
            update_momentum_(
                [_momentum(s, group, inputs) for s in segments],
                [_gradient(s, group, inputs) for s in segments],
                [inputs.gates[s.piece.parameter] for s in segments],
                group["mu"],
            )

    def _directions(self, flight: _Flight, inputs: StepInputs) -> Iterator[Tensor]:
        segments = flight.bucket.segments(*flight.share)
        group = inputs.groups[flight.bucket.group]
        return directions(
            [_momentum(s, group, inputs) for s in segments],
            [_gradient(s, group, inputs) for s in segments],
            group["mu"],
            nesterov=group["nesterov"],
        )

    def _stack_share(self, flight: _Flight, inputs: StepInputs) -> None:
        """Build the stack of whole matrices that this rank orthogonalizes."""
        if not flight.share_size:
            return
        shape = flight.bucket.rows, flight.bucket.cols
        with self._timer.measure("momentum"):
            if flight.table is None or flight.kept_BP is None:
                directions_BMN = self._directions(flight, inputs)
                flight.stack_BMN = build_stack(
                    directions_BMN, flight.share_size, shape, self._dtype
                )
            else:
                flight.stack_BMN = flight.table.normalized_stack(
                    flight.kept_BP,
                    flight.shared_lines,
                    shape,
                    self._dtype,
                    **self._rule(flight, inputs),
                    num_programs=flight.num_programs,
                )
                flight.is_normalized = True

    def _rule(self, flight: _Flight, inputs: StepInputs) -> dict[str, Any]:
        group = inputs.groups[flight.bucket.group]
        return {"mu": float(group["mu"]), "nesterov": group["nesterov"]}

    # Exchange in.

    def _launch_in(self, flight: _Flight, inputs: StepInputs) -> None:
        """Send this rank's slabs to the owners of their matrices; start receiving owned ones.

        Collective: all-to-all over the bucket's split axis.
        """
        bucket, shards = flight.bucket, flight.groups.shards
        if shards is None:
            self._stack_share(flight, inputs)
            return
        if not flight.share_size:
            return
        message = self._pack(flight, inputs)
        owned = bucket.owned_by_replica(flight.chunk, bucket.replica_rank)
        here = bucket.owned_here(flight.chunk)
        flight.transfer = self._exchange.launch_all_to_all(
            message.flatten(),
            [count * message.shape[1] for count in owned],
            [here * (rows * cols + TAIL) for rows, cols in _slab_shapes(bucket)],
            shards,
        )

    def _pack(self, flight: _Flight, inputs: StepInputs) -> Tensor:
        """Return the message of this replica's share: [slabs, elements + TAIL]."""
        with self._timer.measure("momentum"):
            if flight.table is None or flight.kept_BP is None:
                return pack(
                    self._directions(flight, inputs),
                    flight.share_size,
                    flight.bucket.local_matrix_shape,
                    self._dtype,
                )
            return flight.table.message(
                flight.kept_BP, flight.shared_lines, self._dtype, **self._rule(flight, inputs)
            )

    def _wait_in(self, flight: _Flight) -> None:
        if flight.transfer is None:
            return
        bucket, shapes = flight.bucket, _slab_shapes(flight.bucket)
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

    def _orthogonalize_stack(self, flight: _Flight, inputs: StepInputs) -> None:
        stack_BMN, bucket = flight.stack_BMN, flight.bucket
        if stack_BMN is None:
            return
        if len(stack_BMN):
            with self._timer.measure("newton_schulz"):
                stack_BMN = self._orthogonalize(
                    stack_BMN, flight.index, is_normalized=flight.is_normalized
                )
            if inputs.stats is not None:
                inputs.stats.observe(bucket.group, stack_BMN, bucket.lr_scale)
        flight.stack_BMN, flight.update_BMN = None, stack_BMN

    # Exchange out.

    def _launch_out(self, flight: _Flight) -> None:
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

    def _wait_out(self, flight: _Flight) -> None:
        if flight.transfer is not None:
            received = self._exchange.wait(flight.transfer)
            flight.transfer = None
            flight.update_BMN = received.view(flight.share_size, *flight.bucket.local_matrix_shape)

    def _launch_share(self, flight: _Flight, inputs: StepInputs) -> None:
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

    def _apply(self, flight: _Flight, inputs: StepInputs) -> None:
        self._apply_received(flight, inputs)
        flight.update_BMN = flight.table = flight.kept_BP = None

    def _apply_received(self, flight: _Flight, inputs: StepInputs) -> None:
        group = inputs.groups[flight.bucket.group]
        settings = {
            "step_size": float(group["lr"]) * flight.bucket.lr_scale,
            "decay": float(group["lr"]) * float(group["weight_decay"]),
        }
        for first, update_BMN in self._received_updates(flight):
            stop = first + len(update_BMN)
            if stop == first:
                continue
            with self._timer.measure("update"):
                if flight.table and update_BMN.is_contiguous() and not group["cautious_wd"]:
                    lines = slice(first - flight.chunk.start, stop - flight.chunk.start)
                    flight.table.apply_(
                        update_BMN, lines, **settings, num_programs=flight.num_programs
                    )
                    continue
                segments = flight.bucket.segments(first, stop)
                apply_updates_(
                    [_weight(s, group, inputs) for s in segments],
                    update_BMN.split([s.stop - s.start for s in segments]),
                    [inputs.gates[s.piece.parameter] for s in segments],
                    cautious=group["cautious_wd"],
                    **settings,
                )

    def _received_updates(self, flight: _Flight) -> list[tuple[int, Tensor]]:
        """Return (first matrix, updates [local_B, local rows, local cols]), by replica."""
        bucket, chunk = flight.bucket, flight.chunk
        if flight.groups.replicas is None:
            return [] if flight.update_BMN is None else [(chunk.start, flight.update_BMN)]
        if flight.transfer is None:
            return []
        received = self._exchange.wait(flight.transfer)
        received_RBMN = received.view(bucket.num_replicas, -1, *bucket.local_matrix_shape)
        updates, first = [], chunk.start
        for replica, update_BMN in enumerate(received_RBMN):
            share = bucket.share(chunk, replica)
            updates.append((first, update_BMN[:share]))
            first += share
        return updates


def _runs(flight: _Flight, weights: Sequence[Tensor], inputs: StepInputs) -> list[Run]:
    """Return where the matrices of a chunk lie."""
    flatten = inputs.groups[flight.bucket.group]["flatten"]
    runs = []
    for segment in flight.bucket.segments(flight.chunk.start, flight.chunk.stop):
        piece = segment.piece
        _, rows, cols = as_matrices(weights[piece.parameter], flatten=flatten).shape
        first_row, stop_row = piece.local_rows
        runs.append(
            Run(
                parameter=piece.parameter,
                first=segment.start,
                count=segment.stop - segment.start,
                stride=rows * cols,
                offset=first_row * cols,
                num_elements=(stop_row - first_row) * cols,
            )
        )
    return runs


def _slab_shapes(bucket: Bucket) -> list[tuple[int, int]]:
    """Return each shard rank's rows and columns of a matrix."""
    if bucket.split_dim == 0:
        return [(slab, bucket.cols) for slab in bucket.slab_sizes]
    return [(bucket.rows, slab) for slab in bucket.slab_sizes]


def _part(tensor: Tensor, segment: Segment, group: dict[str, Any]) -> Tensor:
    matrices_BMN = as_matrices(local(tensor), flatten=group["flatten"])
    return matrices_BMN[segment.start : segment.stop, slice(*segment.piece.local_rows)]


def _weight(segment: Segment, group: dict[str, Any], inputs: StepInputs) -> Tensor:
    return _part(inputs.parameters[segment.piece.parameter], segment, group)


def _momentum(segment: Segment, group: dict[str, Any], inputs: StepInputs) -> Tensor:
    return _part(inputs.momenta[segment.piece.parameter], segment, group)


def _gradient(segment: Segment, group: dict[str, Any], inputs: StepInputs) -> Tensor | None:
    gradient = inputs.parameters[segment.piece.parameter].grad
    return None if gradient is None else _part(gradient, segment, group)
