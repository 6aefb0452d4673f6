from hypothesis import given
from hypothesis import strategies as st

from trainer.optim.bucket import Bucket, Chunk, Piece
from trainer.optim.spec import MeshSpec

MESH = MeshSpec(("dp_replicate", "dp_shard"), (2, 3), (1, 2))


def bucket_of(pieces=(), chunks=(), **changes) -> Bucket:
    fields = {
        "group": 0, "layout": "matrix", "rows": 8, "cols": 5, "dtype": "float32", "mesh": MESH,
        "replica_axes": (0,), "num_replicas": 2, "replica_rank": 1, "split_axis": 1,
        "split_dim": 0, "slab_sizes": (3, 3, 2), "shard_rank": 2, "lr_scale": 1.0,
        "kernel": "dense", "kernel_reason": "", "pieces": tuple(pieces), "chunks": tuple(chunks),
    }  # fmt: skip
    return Bucket(**{**fields, **changes})


@given(counts=st.lists(st.integers(0, 4), max_size=5), data=st.data())
def test_segments_are_the_matrices_asked_for_in_order(counts, data) -> None:
    pieces = [Piece(10 + i, (0, 3), count, count) for i, count in enumerate(counts)]
    total = sum(counts)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    segments = bucket_of(pieces).segments(start, stop)
    every = [(piece.parameter, i) for piece in pieces for i in range(piece.num_matrices)]
    found = [(s.piece.parameter, i) for s in segments for i in range(s.start, s.stop)]
    assert found == every[start:stop]
    assert all(segment.start < segment.stop for segment in segments)


def test_shares_follow_replicas_and_shards() -> None:
    chunk = Chunk(0, 9, (1, 2, 1, 2, 1, 2))
    bucket = bucket_of(chunks=[chunk])
    assert bucket.owned_by_replica(chunk, 0) == (1, 2, 1)
    assert [bucket.share(chunk, replica) for replica in (0, 1)] == [4, 5]
    assert bucket.owned_here(chunk) == 2


def test_local_matrices_are_slabs_of_this_ranks_size() -> None:
    assert bucket_of().local_matrix_shape == (2, 5)
    assert bucket_of(split_dim=1, slab_sizes=(2, 2, 1)).local_matrix_shape == (8, 1)
    whole = bucket_of(split_axis=None, slab_sizes=(), shard_rank=0)
    assert whole.local_matrix_shape == (8, 5)
    assert whole.num_shards == 1


def test_a_chunk_takes_part_in_what_it_has_something_for() -> None:
    chunk = Chunk(0, 3, (1, 0, 0, 1, 1, 0))
    assert bucket_of().num_collectives(chunk) == 3
    # Replica 1 owns nothing: no exchange there, but it receives what replica 0 did.
    assert bucket_of().num_collectives(Chunk(0, 2, (1, 1, 0, 0, 0, 0))) == 1
    assert bucket_of().num_collectives(Chunk(2, 2, (0,) * 6)) == 0
    # This rank's slab is empty: exchanged with the others of its replica, shared with none.
    assert bucket_of(slab_sizes=(4, 4, 0)).num_collectives(chunk) == 2


def test_what_stays_on_a_rank_is_not_exchanged() -> None:
    assert bucket_of().is_exchanged
    local = bucket_of(split_axis=None, slab_sizes=(), num_replicas=1, replica_axes=())
    assert not local.is_exchanged
    assert local.num_collectives(Chunk(0, 3, (3,))) == 0
