from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.errors import UserError
from trainer.optim.bucketing import PlannedGroup, PlanOptions, is_gate_up, make_buckets
from trainer.optim.spec import AxisPlacement, MeshSpec, ParameterSpec

R, S0, S1, S2 = AxisPlacement(), AxisPlacement(0), AxisPlacement(1), AxisPlacement(2)
GATE_UP = "layers.0.mlp.experts.gate_up_proj"


def buckets_of(*specs, options=PlanOptions("float32"), **group):  # noqa: B008 (frozen)
    planned = PlannedGroup("g", "muon", tuple(specs), **group)
    return make_buckets([planned], options, lambda shape: ("dense", str(shape)))


def on(sizes, coordinate, placements, shape, name="w", dtype="float32") -> ParameterSpec:
    mesh = MeshSpec(tuple("abc"[: len(sizes)]), sizes, coordinate)
    return ParameterSpec(name, shape, dtype, mesh, placements)


@settings(max_examples=50)
@given(
    shards=st.integers(1, 5),
    half=st.integers(1, 9),
    cut=st.sampled_from([S1, S2]),
)
def test_gate_and_up_meet_where_the_fused_rows_part(shards, half, cut) -> None:
    """Slabs of both halves cover every row once, on the rank that holds it."""
    rows, cols = 2 * half, 6
    options = PlanOptions("float32", split_gate_up=True)
    covered = []
    for rank in range(shards):
        spec = on((shards,), (rank,), (cut,), (3, rows, cols), GATE_UP)
        # Gate and up are of one shape, so they share a bucket where their slabs agree too.
        buckets = buckets_of(spec, options=options)
        pieces = [piece for bucket in buckets for piece in bucket.pieces]
        assert len(pieces) == 2
        assert {(bucket.rows, bucket.cols) for bucket in buckets} == {(half, cols)}
        length = -(-rows // shards)
        first = min(rank * length, rows) if cut is S1 else 0
        for piece in pieces:
            start, stop = piece.local_rows
            covered += [(rank if cut is S2 else 0, row + first) for row in range(start, stop)]
    ranks = range(shards) if cut is S2 else range(1)
    assert sorted(covered) == sorted(product(ranks, range(rows)))


@settings(max_examples=50)
@given(
    count=st.integers(1, 40),
    replicas=st.integers(1, 3),
    shards=st.integers(1, 4),
    cap=st.integers(1, 12),
)
def test_no_owner_gets_more_than_the_cap_in_a_chunk(count, replicas, shards, cap) -> None:
    matrix_bytes = (2 * 8 * 4 + 4 * 4 * 4) * 4
    options = PlanOptions("float32", max_stack_gib=cap * matrix_bytes / 2**30)
    specs = [on((replicas, shards), (0, 0), (R, S0), (8, 4)) for _ in range(count)]
    (bucket,) = buckets_of(*specs, options=options)
    # A chunk gives every owner a matrix, however small the cap.
    for chunk in bucket.chunks:
        assert max(chunk.owned) <= max(cap, replicas)
        assert sum(chunk.owned) == chunk.stop - chunk.start
    assert [chunk.start for chunk in bucket.chunks[1:]] == [c.stop for c in bucket.chunks[:-1]]
    assert bucket.chunks[-1].stop == count


def test_ranks_with_fewer_experts_cut_as_many_chunks() -> None:
    options = PlanOptions("float32", max_stack_gib=1e-9)
    counts = []
    for rank in range(4):
        spec = on((4,), (rank,), (S0,), (5, 8, 4))  # 2, 2, 1 and 0 experts
        (bucket,) = buckets_of(spec, options=options)
        counts.append([chunk.stop - chunk.start for chunk in bucket.chunks])
    assert counts == [[1, 1], [1, 1], [0, 1], [0, 0]]


def test_flattened_kernels_are_one_matrix_each() -> None:
    spec = on((2,), (1,), (S1,), (6, 4, 3, 3))
    (stack,) = buckets_of(spec, flatten=False)
    assert (stack.layout, stack.rows, stack.cols) == ("stack", 3, 3)
    assert sum(piece.num_matrices for piece in stack.pieces) == 6 * 2
    (matrix,) = buckets_of(spec, flatten=True)
    assert (matrix.layout, matrix.rows, matrix.cols) == ("matrix", 6, 36)
    assert (matrix.split_dim, matrix.slab_sizes) == (1, (18, 18))


def test_empty_parameters_and_adamws_are_in_no_bucket() -> None:
    assert buckets_of(ParameterSpec("w", (0, 4), "float32")) == []
    group = PlannedGroup("rest", "adamw", (ParameterSpec("w", (4, 4), "float32"),))
    assert make_buckets([group], PlanOptions(), lambda shape: ("", "")) == []


def test_a_kernel_is_chosen_for_the_largest_stack_of_an_owner() -> None:
    specs = [on((2,), (0,), (S0,), (8, 4), f"w{i}") for i in range(5)]
    (bucket,) = buckets_of(*specs)
    assert bucket.kernel_reason == "(3, 8, 4)"


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        (GATE_UP, True),
        ("_orig_mod.experts.gate_up_proj", True),
        ("mlp.gate_up_proj", False),
        ("mlp.experts.gate_up_proj_bias", False),
    ],
)
def test_the_fused_projection_is_known_by_its_name(name, is_one) -> None:
    assert is_gate_up(name) == is_one


def test_strided_rows_hide_where_gate_ends() -> None:
    spec = on((2,), (0,), (AxisPlacement(1, 2),), (3, 8, 4), GATE_UP)
    with pytest.raises(UserError, match=r"optim\.split_gate_up=true.*gate_up_proj \[3, 8, 4\]"):
        buckets_of(spec, options=PlanOptions("float32", split_gate_up=True))
