"""What a plan costs on its rank: FLOPs, bytes over each axis, temporaries, time on a known GPU.

Owns the counting. Counts follow `pipeline.py` literally, so a plan prices what will run; times rest
on the measured rates below and on nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from trainer.errors import UserError
from trainer.optim.bucket import BYTES, Bucket, Chunk
from trainer.optim.coefficients import CoefficientTable
from trainer.optim.kernels.select import KernelChoice
from trainer.optim.layout import local_shape
from trainer.optim.newton_schulz import newton_schulz_flops, newton_schulz_workspace_bytes
from trainer.optim.pipeline import NS_DTYPES
from trainer.optim.plan import Plan, PlannedGroup
from trainer.optim.wire import TAIL

GIB = 2**30


@dataclass(frozen=True)
class Rates:
    """Measured rates of one GPU.

    Attributes:
        tflops: Of batched half-precision products at the shapes of experts.
        memory_gb_s: Read plus written, device memory.
        link_gb_s: Sent by one GPU in an all-to-all within a host.
    """

    tflops: float
    memory_gb_s: float
    link_gb_s: float


RATES = {
    # torch 2.11, 2026-11-30, scripts/bench/muon_step.py at 8, 16 and 48 layers of Qwen3-30B-A3B:
    # Newton-Schulz, and the passes around it, as they run within a step; their sum is 1 to 3 %
    # under the step. The link is NVLink 4's nominal 450 GB/s at the usual four fifths.
    "H200": Rates(tflops=550, memory_gb_s=3500, link_gb_s=360),
    # Same chip, HBM3 instead of HBM3e; not measured: scaled by the data sheets' ratio.
    "H100": Rates(tflops=550, memory_gb_s=2440, link_gb_s=360),
}


@dataclass(frozen=True)
class Price:
    """The cost of one optimizer step on one rank.

    Attributes:
        flops: Of Newton-Schulz.
        sent_bytes: Bytes sent to other ranks, by axis.
        num_collectives: Joined: exchanges and agreements.
        state_bytes: Optimizer state on this rank.
        temporary_bytes: The most that the step holds above weights, gradients and state.
        memory_bytes: Read and written by momentum, stacks and updates.
        kernels: For each matrix shape, the kernel and why.
    """

    flops: int
    sent_bytes: dict[str, int]
    num_collectives: int
    state_bytes: int
    temporary_bytes: int
    memory_bytes: int
    kernels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Passes:
    """How a step passes over momentum and weights.

    Attributes:
        is_by_table: One kernel visits a chunk's matrices without temporaries and writes stacks
            normalized, as on a GPU; False: parameter by parameter.
        is_cautious: `cautious_wd`, whose updates are applied parameter by parameter.
    """

    is_by_table: bool = True
    is_cautious: bool = False


def price_plan(
    plan: Plan,
    groups: Sequence[PlannedGroup],
    kernels: Sequence[KernelChoice],
    *,
    steps: int = 5,
    coefficients: CoefficientTable = "quintic",
    passes: Passes = Passes(),
) -> Price:
    """Price a plan.

    Args:
        plan: From `plan_with_kernels`.
        groups: What it was made from.
        kernels: The choice for each bucket, from the same call.
        steps: `ns_steps`.
        coefficients: `ns_coefficients`.
        passes: How the elementwise passes run.
    """
    dtype = NS_DTYPES[plan.options.ns_dtype]
    sent: dict[str, int] = {}
    flops, held = 0, []
    for b, c in plan.slots:
        bucket, kernel = plan.buckets[b], kernels[b]
        chunk = bucket.chunks[c]
        shape = bucket.owned_here(chunk), bucket.rows, bucket.cols
        flops += newton_schulz_flops(
            shape, steps=steps, coefficients=coefficients, dtype=dtype, kernel=kernel
        )
        work = newton_schulz_workspace_bytes(
            shape, steps=steps, coefficients=coefficients, dtype=dtype, kernel=kernel
        )
        held.append(_held_bytes(bucket, chunk, work, plan.options.ns_dtype, passes))
        for axis, count in _sent_bytes(bucket, chunk, plan.options.ns_dtype).items():
            sent[axis] = sent.get(axis, 0) + count
    names = {f"{b.rows}x{b.cols}": f"{b.kernel} ({b.kernel_reason})" for b in plan.buckets}
    return Price(
        flops=flops,
        sent_bytes=sent,
        num_collectives=plan.num_collectives(),
        state_bytes=sum(_state_bytes(group) for group in groups),
        temporary_bytes=_peak(held),
        memory_bytes=sum(_moved_bytes(b, plan.options.ns_dtype) for b in plan.buckets),
        kernels=names,
    )


def predict_ms(price: Price, gpu: str) -> dict[str, float]:
    """Predict the milliseconds of each phase of a step, and their sum without overlap.

    Args:
        price: From `price_plan`.
        gpu: A name in `RATES`.

    Raises:
        UserError: no rates are known for that GPU.
    """
    if gpu not in RATES:
        raise UserError(f"gpu={gpu!r}: rates are known for {', '.join(RATES)}; choose one of them")
    rates = RATES[gpu]
    phases = {
        "newton_schulz_ms": price.flops / rates.tflops / 1e9,
        "elementwise_ms": price.memory_bytes / rates.memory_gb_s / 1e6,
        "exchange_ms": sum(price.sent_bytes.values()) / rates.link_gb_s / 1e6,
    }
    return {**phases, "total_ms": sum(phases.values())}


def _sent_bytes(bucket: Bucket, chunk: Chunk, ns_dtype: str) -> dict[str, int]:
    """Return what this rank sends for a chunk, by axis: in and out over shards, out to replicas."""
    if bucket.mesh is None:
        return {}
    sent = {}
    size = BYTES[ns_dtype]
    rows, cols = bucket.local_matrix_shape
    if bucket.split_axis is not None and bucket.num_shards > 1:
        here = bucket.owned_here(chunk)
        others = bucket.share(chunk, bucket.replica_rank) - here
        slabs_out = here * (bucket.rows * bucket.cols - rows * cols)
        axis = bucket.mesh.axes[bucket.split_axis]
        sent[axis] = size * (others * (rows * cols + TAIL) + slabs_out)
    if bucket.num_replicas > 1 and chunk.stop > chunk.start:
        axis = " x ".join(bucket.mesh.axes[a] for a in bucket.replica_axes)
        part = max(bucket.share(chunk, replica) for replica in range(bucket.num_replicas))
        sent[axis] = size * part * rows * cols * (bucket.num_replicas - 1)
    return sent


@dataclass(frozen=True)
class _Held:
    """Bytes of a chunk in the pipeline: the most within each stage, and what is left behind it."""

    entering: int
    entered: int
    turning: int
    turned: int
    sharing: int
    shared: int
    finishing: int


_NOTHING = _Held(0, 0, 0, 0, 0, 0, 0)


def _held_bytes(
    bucket: Bucket, chunk: Chunk, workspace: int, ns_dtype: str, passes: Passes
) -> _Held:
    """Count a chunk's buffers through `pipeline.StackedStep`, stage by stage."""
    size = BYTES[ns_dtype]
    slab = bucket.local_matrix_shape[0] * bucket.local_matrix_shape[1]
    stack = size * bucket.owned_here(chunk) * bucket.rows * bucket.cols
    share = size * bucket.share(chunk, bucket.replica_rank) * slab
    apart = _pass_bytes(bucket, chunk, passes)
    if bucket.num_shards == 1:
        entering, turned = stack + apart, stack
        # A normalized stack is one of the iteration's two buffers, which the workspace counts;
        # another is copied into it.
        turning = workspace + (0 if passes.is_by_table else stack)
    else:
        entering, turned = max(share + apart, share + stack), stack + share
        # Received slabs and the stack joined from them; that stack, copied to be normalized; the
        # result, cut up anew, and what is received for it.
        turning = max(stack + max(stack, workspace), stack + turned)
    entered = stack if bucket.num_shards == 1 else share + stack
    if bucket.num_replicas == 1:
        leaves_early = not bucket.is_exchanged
        sharing = turned + (apart if leaves_early else 0)
        shared, finishing = (0, 0) if leaves_early else (share, share + apart)
        return _Held(entering, entered, turning, turned, sharing, shared, finishing)
    part = size * slab * max(bucket.share(chunk, r) for r in range(bucket.num_replicas))
    gathered = part * bucket.num_replicas
    sharing = max(turned, share + part, part + gathered)
    return _Held(
        entering, entered, turning, turned, sharing, part + gathered, part + gathered + apart
    )


def _pass_bytes(bucket: Bucket, chunk: Chunk, passes: Passes) -> int:
    """Return temporaries of the elementwise passes: one parameter's at a time."""
    slab = bucket.local_matrix_shape[0] * bucket.local_matrix_shape[1]
    segments = bucket.segments(chunk.start, chunk.stop)
    elements = slab * max((segment.stop - segment.start for segment in segments), default=0)
    if passes.is_cautious:
        # What opposes its weight, the decay of each element, that masked, and the new weight.
        return elements * (1 + 3 * BYTES[bucket.dtype])
    return 0 if passes.is_by_table else elements * BYTES[bucket.dtype]


def _peak(held: Sequence[_Held]) -> int:
    """Return the most held at once: in each tick four chunks advance, the latest first."""
    padded = [_NOTHING] * 3 + list(held) + [_NOTHING] * 3
    ticks = zip(padded[3:], padded[2:], padded[1:], padded, strict=False)
    return max((_tick_peak(*chunks) for chunks in ticks), default=0)


def _tick_peak(first: _Held, second: _Held, third: _Held, fourth: _Held) -> int:
    return max(
        first.entering + second.entered + third.turned + fourth.shared,
        first.entered + second.turning + third.turned + fourth.shared,
        first.entered + second.turned + third.sharing + fourth.shared,
        first.entered + second.turned + third.shared + fourth.finishing,
    )


def _moved_bytes(bucket: Bucket, ns_dtype: str) -> int:
    """Return bytes read and written around the orthogonalization of a bucket's own matrices."""
    slab = bucket.local_matrix_shape[0] * bucket.local_matrix_shape[1]
    elements = slab * sum(piece.num_matrices for piece in bucket.pieces)
    weight = BYTES[bucket.dtype]
    # Gradient read; momentum and weight read and written; momentum read once more and written
    # scaled in `ns_dtype`; the update read.
    return elements * (weight * 6 + BYTES[ns_dtype] * 2)


def _state_bytes(group: PlannedGroup) -> int:
    copies = 2 if group.algorithm == "adamw" else 1
    return sum(
        copies * torch.Size(local_shape(spec)).numel() * BYTES[spec.dtype]
        for spec in group.parameters
    )
