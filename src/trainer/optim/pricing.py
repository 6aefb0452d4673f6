"""What a plan costs on its rank: FLOPs, bytes over each axis, temporaries.

Owns the counting. Counts follow `pipeline.py` literally, so a plan prices what will run; chunks
under way are counted in `pipeline_memory.py`, times predicted in `rates.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from trainer.optim.bucket import BYTES, Bucket, Chunk
from trainer.optim.coefficients import CoefficientTable
from trainer.optim.kernels.select import KernelChoice
from trainer.optim.layout import local_shape
from trainer.optim.newton_schulz import newton_schulz_flops, newton_schulz_workspace_bytes
from trainer.optim.pipeline import NS_DTYPES
from trainer.optim.pipeline_memory import ON_A_GPU, Passes, held_bytes, peak_bytes
from trainer.optim.plan import Plan, PlannedGroup
from trainer.optim.weight_targets import is_updated_in_product
from trainer.optim.wire import TAIL


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


def price_plan(
    plan: Plan,
    groups: Sequence[PlannedGroup],
    kernels: Sequence[KernelChoice],
    *,
    steps: int = 5,
    coefficients: CoefficientTable = "quintic",
    passes: Passes = ON_A_GPU,
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
    flops, moved, held = 0, 0, []
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
        is_fused = is_updated_in_product(bucket, chunk, kernel, is_cautious=passes.is_cautious)
        held.append(held_bytes(bucket, chunk, work, plan.options.ns_dtype, passes, is_fused))
        moved += _moved_bytes(bucket, chunk, plan.options.ns_dtype, is_fused=is_fused)
        for axis, count in _sent_bytes(bucket, chunk, plan.options.ns_dtype).items():
            sent[axis] = sent.get(axis, 0) + count
    names = {f"{b.rows}x{b.cols}": f"{b.kernel} ({b.kernel_reason})" for b in plan.buckets}
    return Price(
        flops=flops,
        sent_bytes=sent,
        num_collectives=plan.num_collectives(),
        state_bytes=state_bytes(groups),
        temporary_bytes=peak_bytes(held),
        memory_bytes=moved,
        kernels=names,
    )


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


def _moved_bytes(bucket: Bucket, chunk: Chunk, ns_dtype: str, *, is_fused: bool) -> int:
    """Return bytes read and written around the orthogonalization of a chunk."""
    slab = bucket.local_matrix_shape[0] * bucket.local_matrix_shape[1]
    weight = BYTES[bucket.dtype]
    # Gradient read; momentum read and written, read once more and written scaled in `ns_dtype`.
    moved = weight * 4 + BYTES[ns_dtype]
    if not is_fused:
        # The weight read and written; the update read.
        moved += weight * 2 + BYTES[ns_dtype]
    return (chunk.stop - chunk.start) * slab * moved


def state_bytes(groups: Sequence[PlannedGroup]) -> int:
    """Return the bytes of optimizer state on this rank."""
    return sum(
        (2 if group.algorithm == "adamw" else 1)
        * torch.Size(local_shape(spec)).numel()
        * BYTES[spec.dtype]
        for group in groups
        for spec in group.parameters
    )
