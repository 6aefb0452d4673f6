"""How much memory a step's chunks hold on their way through the pipeline.

Owns the counting, stage by stage as in `pipeline.py`, whose order of stages and whose buffers it
follows literally. The rest of a step's price is in `pricing.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.optim.bucket import BYTES, Bucket, Chunk


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


ON_A_GPU = Passes()


@dataclass(frozen=True)
class Held:
    """Bytes of a chunk in the pipeline: the most within each stage, and what is left behind it."""

    entering: int
    entered: int
    turning: int
    turned: int
    sharing: int
    shared: int
    finishing: int


_NOTHING = Held(0, 0, 0, 0, 0, 0, 0)


def held_bytes(
    bucket: Bucket,
    chunk: Chunk,
    workspace: int,
    ns_dtype: str,
    passes: Passes,
    is_fused: bool = False,
) -> Held:
    """Count a chunk's buffers through `pipeline.StackedStep`, stage by stage.

    Args:
        bucket: Of the chunk.
        chunk: What is counted.
        workspace: Bytes that its orthogonalization allocates, result included.
        ns_dtype: Of stacks and messages.
        passes: How the elementwise passes run.
        is_fused: Its last product updates the weights and leaves nothing.
    """
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
    if is_fused:
        return Held(entering, entered, turning, 0, 0, 0, 0)
    if bucket.num_replicas == 1:
        leaves_early = not bucket.is_exchanged
        sharing = turned + (apart if leaves_early else 0)
        shared, finishing = (0, 0) if leaves_early else (share, share + apart)
        return Held(entering, entered, turning, turned, sharing, shared, finishing)
    part = size * slab * max(bucket.share(chunk, r) for r in range(bucket.num_replicas))
    gathered = part * bucket.num_replicas
    sharing = max(turned, share + part, part + gathered)
    return Held(
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


def peak_bytes(held: Sequence[Held]) -> int:
    """Return the most held at once, tick by tick: four chunks advance, the latest first."""
    padded = [_NOTHING] * 3 + list(held) + [_NOTHING] * 3
    ticks = zip(padded[3:], padded[2:], padded[1:], padded, strict=False)
    return max((_tick_peak(*chunks) for chunks in ticks), default=0)


def _tick_peak(first: Held, second: Held, third: Held, fourth: Held) -> int:
    """Return the most within a tick: one chunk enters, one turns, one shares, one finishes."""
    return max(
        first.entering + second.entered + third.turned + fourth.shared,
        first.entered + second.turning + third.turned + fourth.shared,
        first.entered + second.turned + third.sharing + fourth.shared,
        first.entered + second.turned + third.shared + fourth.finishing,
    )
