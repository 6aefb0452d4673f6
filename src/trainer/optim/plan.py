"""Which rank orthogonalizes what, and when: plain frozen data, built once from descriptions.

Owns the plan: buckets in their order of execution, and the routing of every parameter. Needs no
tensor, no process group and no collective, so that a plan for 512 ranks can be made anywhere.
Buckets come from `bucketing.py`; prices are in `pricing.py`, the printed table in `table.py`;
`pipeline.py` carries a plan out.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainer.optim.agreement import Agreements, plan_agreements
from trainer.optim.bucket import Bucket
from trainer.optim.bucketing import ChooseKernel, PlannedGroup, PlanOptions, make_buckets
from trainer.optim.spec import ParameterSpec


@dataclass(frozen=True)
class Route:
    """A parameter's line in the routing table."""

    parameter: str
    shape: tuple[int, ...]
    dtype: str
    group: str
    algorithm: str
    lr_scale: float
    layout: str
    kernel: str
    kernel_reason: str


@dataclass(frozen=True)
class Plan:
    """Everything the step follows on one rank.

    Attributes:
        options: The settings it was made with.
        routes: One line for each parameter, in the order in which pieces count them.
        buckets: What is orthogonalized together.
        slots: (bucket, chunk) in the order of execution, the same on every rank.
        agreements: Who agrees, before the step, on gradients that some ranks lack.
        num_gathers: All-reduces by which `impl = "per_matrix"` gathers parameters; it has neither
            buckets nor slots.
    """

    options: PlanOptions
    routes: tuple[Route, ...]
    buckets: tuple[Bucket, ...]
    slots: tuple[tuple[int, int], ...]
    agreements: Agreements
    num_gathers: int = 0

    def num_exchanges(self) -> int:
        """Return the exchanges this rank joins in a step: in, out, and sharing with replicas."""
        in_buckets = sum(b.num_collectives(chunk) for b in self.buckets for chunk in b.chunks)
        return in_buckets + self.num_gathers

    def num_collectives(self) -> int:
        """Return all collectives this rank joins in a step: exchanges and agreements.

        A step that collects statistics (`stats_interval`) joins two more.
        """
        return self.num_exchanges() + len(self.agreements)

    def to_json(self) -> str:
        """Return the plan as a JSON object."""
        return json.dumps(self.as_dict(), indent=1)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain dicts and lists."""
        return {**asdict(self), "num_collectives": self.num_collectives()}


def build_plan(
    groups: Sequence[PlannedGroup], options: PlanOptions, choose_kernel: ChooseKernel
) -> Plan:
    """Plan the step of one rank.

    Ranks that describe the same parameters get plans that fit together: the same buckets and slots
    in the same order, and for each exchange the same counts on all ranks that take part.

    Args:
        groups: The param groups, in order.
        options: Settings that shape the plan.
        choose_kernel: Called once for each bucket with the largest stack a rank orthogonalizes.

    Raises:
        UserError: a parameter cannot be orthogonalized as it lies.
    """
    buckets = make_buckets(groups, options, choose_kernel)
    specs = [spec for group in groups for spec in group.parameters]
    return Plan(
        options,
        _routes(groups, buckets),
        tuple(buckets),
        _order_slots(buckets),
        plan_agreements(specs),
    )


def _order_slots(buckets: Sequence[Bucket]) -> tuple[tuple[int, int], ...]:
    """Spread exchanged chunks evenly among local ones, whose work hides the exchange.

    A local chunk comes first: while it is orthogonalized, the first exchange is prepared and runs.
    """
    exchanged, local = [], []
    for b, bucket in enumerate(buckets):
        slots = exchanged if bucket.is_exchanged else local
        slots.extend((b, c) for c in range(len(bucket.chunks)))
    placed = [((i + 0.5) / len(exchanged), 1, slot) for i, slot in enumerate(exchanged)]
    placed += [(i / len(local), 0, slot) for i, slot in enumerate(local)]
    return tuple(slot for _, _, slot in sorted(placed))


def _routes(groups: Sequence[PlannedGroup], buckets: Sequence[Bucket]) -> tuple[Route, ...]:
    by_parameter = {piece.parameter: b for b in buckets for piece in b.pieces}
    specs = [(group, spec) for group in groups for spec in group.parameters]
    return tuple(
        _route(group, spec, by_parameter.get(index)) for index, (group, spec) in enumerate(specs)
    )


def _route(group: PlannedGroup, spec: ParameterSpec, bucket: Bucket | None) -> Route:
    if bucket is None:
        return make_route(group, spec)
    kernel = bucket.kernel, bucket.kernel_reason
    return make_route(group, spec, bucket.lr_scale, _layout_text(bucket, spec), kernel)


def make_route(
    group: PlannedGroup,
    spec: ParameterSpec,
    lr_scale: float = 1.0,
    layout: str = "elementwise",
    kernel: tuple[str, str] = ("", ""),
) -> Route:
    """Return a parameter's line; as it stands, of one that is not orthogonalized.

    Args:
        group: Of the parameter.
        spec: The parameter.
        lr_scale: The update's factor s.
        layout: How its matrices are brought together.
        kernel: What orthogonalizes them, and why.
    """
    return Route(
        spec.name, spec.shape, spec.dtype, group.name, group.algorithm, lr_scale, layout, *kernel
    )


def _layout_text(bucket: Bucket, spec: ParameterSpec) -> str:
    axes = bucket.mesh.axes if bucket.mesh else ()
    sizes = bucket.mesh.sizes if bucket.mesh else ()
    over = [axes[a] for a, p in enumerate(spec.placements) if p.dim is not None and sizes[a] > 1]
    match bucket.layout:
        case "whole":
            text = "whole"
        case "stack":
            text = f"stack split over {' x '.join(over)}"
        case "matrix":
            assert bucket.split_axis is not None
            cut = ("rows", "columns")[bucket.split_dim]
            text = f"{cut} cut over {axes[bucket.split_axis]}"
            stacked = [name for name in over if name != axes[bucket.split_axis]]
            text += f", stack split over {' x '.join(stacked)}" if stacked else ""
    if bucket.replica_axes:
        text += f", shared over {' x '.join(axes[a] for a in bucket.replica_axes)}"
    return text
