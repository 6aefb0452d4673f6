import json
import time
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.qwen3_moe import qwen3_30b_a3b
from trainer.config.optim import MuonConfig
from trainer.errors import UserError
from trainer.optim.bucketing import lr_scale
from trainer.optim.plan import PlannedGroup, PlanOptions, build_plan
from trainer.optim.setup import plan_groups
from trainer.optim.spec import AxisPlacement, MeshSpec, ParameterSpec
from trainer.optim.table import routing_table

R, S0, S1 = AxisPlacement(), AxisPlacement(0), AxisPlacement(1)


def choose(shape):
    return "dense", f"for {shape}"


def plans_of_all_ranks(shapes, sizes, placements, **options):
    axes = ("a", "b", "c")[: len(sizes)]
    plans = {}
    for coordinate in product(*(range(size) for size in sizes)):
        mesh = MeshSpec(axes, sizes, coordinate)
        specs = tuple(
            ParameterSpec(f"p{i}", shape, "float32", mesh, placements)
            for i, shape in enumerate(shapes)
        )
        group = PlannedGroup("dense", "muon", specs)
        plans[coordinate] = build_plan([group], PlanOptions("float32", **options), choose)
    return plans


LAYOUTS = [
    ((4,), (S0,)),
    ((4,), (S1,)),
    ((4,), (R,)),
    ((2, 4), (R, S0)),
    ((2, 4), (R, S1)),
    ((3, 2), (R, R)),
    ((2, 2, 2), (R, AxisPlacement(0, 2), S0)),
    ((2, 2, 2), (R, S1, S0)),
]
SHAPES = [((6, 5, 4), (3, 5, 4), (1, 7, 2)), ((16, 8),) * 7 + ((3, 5), (1, 7))]


@pytest.mark.parametrize(("sizes", "placements"), LAYOUTS, ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=["stacks", "matrices"])
@pytest.mark.parametrize("max_stack_gib", [2.0, 1e-7], ids=["one chunk", "many chunks"])
def test_every_matrix_has_one_owner(sizes, placements, shapes, max_stack_gib) -> None:
    if len(sizes) == 3 and len(shapes[0]) == 2:
        pytest.skip("two axes would cut these matrices")
    plans = plans_of_all_ranks(shapes, sizes, placements, max_stack_gib=max_stack_gib)
    owned = sum(b.owned_here(c) for plan in plans.values() for b in plan.buckets for c in b.chunks)
    assert owned == sum(shape[0] if len(shape) == 3 else 1 for shape in shapes)


@pytest.mark.parametrize(("sizes", "placements"), LAYOUTS, ids=str)
def test_plans_of_all_ranks_fit_together(sizes, placements) -> None:
    """Ranks of one exchange agree on counts; all ranks agree on buckets and slots."""
    shapes = SHAPES[0] if len(sizes) == 3 else SHAPES[1]
    plans = plans_of_all_ranks(shapes, sizes, placements, max_stack_gib=1e-7)
    first = next(iter(plans.values()))
    for plan in plans.values():
        assert plan.slots == first.slots
    for index, bucket in enumerate(first.buckets):
        axes = {*bucket.replica_axes, bucket.split_axis}
        partners = {}
        for coordinate, plan in plans.items():
            others = tuple(c for axis, c in enumerate(coordinate) if axis not in axes)
            chunks = plan.buckets[index].chunks
            assert partners.setdefault(others, chunks) == chunks


@settings(max_examples=25, deadline=None)
@given(
    replicas=st.integers(1, 3),
    shards=st.integers(1, 5),
    split=st.sampled_from([S0, S1]),
    shapes=st.lists(st.tuples(*[st.integers(1, 12)] * 2), min_size=1, max_size=8),
    gib=st.sampled_from([2.0, 1e-7, 1e-6]),
)
def test_any_world_covers_every_element_once(replicas, shards, split, shapes, gib) -> None:
    plans = plans_of_all_ranks(shapes, (replicas, shards), (R, split), max_stack_gib=gib)
    owned = held = 0
    for plan in plans.values():
        for bucket in plan.buckets:
            rows, cols = bucket.local_matrix_shape
            for chunk in bucket.chunks:
                owned += bucket.owned_here(chunk)
                held += (chunk.stop - chunk.start) * rows * cols
                assert sum(chunk.owned) == chunk.stop - chunk.start
                assert max(chunk.owned) - min(chunk.owned) <= 1
    assert owned == len(shapes)
    assert held == replicas * sum(rows * cols for rows, cols in shapes)


def test_leftovers_go_to_the_least_loaded() -> None:
    plans = plans_of_all_ranks([(16, 8)] * 6 + [(8, 12)] * 6, (4,), (S0,))
    loads = [sum(b.owned_here(c) for b in p.buckets for c in b.chunks) for p in plans.values()]
    assert loads == [3, 3, 3, 3]


def test_buckets_never_mix_shapes_dtypes_or_placements() -> None:
    mesh = MeshSpec(("a",), (2,), (0,))
    specs = (
        ParameterSpec("a", (4, 4), "float32", mesh, (S0,)),
        ParameterSpec("b", (4, 4), "bfloat16", mesh, (S0,)),
        ParameterSpec("c", (4, 4), "float32", mesh, (S1,)),
        ParameterSpec("d", (4, 6), "float32", mesh, (S0,)),
        ParameterSpec("e", (4, 4), "float32"),
    )
    plan = build_plan([PlannedGroup("dense", "muon", specs)], PlanOptions(), choose)
    assert [len(bucket.pieces) for bucket in plan.buckets] == [1] * 5


def test_local_stacks_of_many_layers_form_one_batch_under_the_cap() -> None:
    specs = tuple(ParameterSpec(f"l{i}.experts.w", (4, 8, 8), "float32") for i in range(6))
    group = PlannedGroup("experts", "muon", specs)
    (bucket,) = build_plan([group], PlanOptions("float32"), choose).buckets
    assert [chunk.stop - chunk.start for chunk in bucket.chunks] == [24]
    cap = 10 * (2 + 4) * 8 * 8 * 4 / 2**30
    (bucket,) = build_plan([group], PlanOptions("float32", max_stack_gib=cap), choose).buckets
    assert [chunk.stop - chunk.start for chunk in bucket.chunks] == [8, 8, 8]


def test_split_gate_up_halves_the_rows_and_scales_by_the_half() -> None:
    spec = ParameterSpec("mlp.experts.gate_up_proj", (4, 12, 4), "float32")
    group = PlannedGroup("experts", "muon", (spec,))
    (bucket,) = build_plan([group], PlanOptions(split_gate_up=True), choose).buckets
    assert (bucket.rows, bucket.cols, bucket.lr_scale) == (6, 4, lr_scale(6, 4, "rms_norm"))
    assert [piece.local_rows for piece in bucket.pieces] == [(0, 6), (6, 12)]


def test_odd_rows_cannot_be_parted() -> None:
    spec = ParameterSpec("mlp.experts.gate_up_proj", (4, 5, 4), "float32")
    group = PlannedGroup("experts", "muon", (spec,))
    with pytest.raises(UserError, match=r"optim\.split_gate_up=true.*gate_up_proj \[4, 5, 4\]"):
        build_plan([group], PlanOptions(split_gate_up=True), choose)


@pytest.mark.parametrize(
    ("adjust_lr", "expected"),
    [("rms_norm", 0.2 * 4), ("spectral_norm", 0.5), (None, 1.0)],
    ids=str,
)
def test_lr_scale(adjust_lr, expected) -> None:
    assert lr_scale(4, 16, adjust_lr) == pytest.approx(expected)


def test_an_unknown_adjust_lr_is_refused() -> None:
    with pytest.raises(UserError, match="adjust_lr='rms'"):
        lr_scale(4, 16, "rms")


def test_a_plan_for_512_ranks_takes_seconds_and_is_json() -> None:
    start = time.process_time()
    specs = qwen3_30b_a3b(100, dp_replicate=4, dp_shard=128, ep=8)
    plan = build_plan(plan_groups(MuonConfig(), specs), PlanOptions(), choose)
    assert time.process_time() - start < 5
    assert json.loads(plan.to_json())["num_collectives"] == plan.num_collectives()
    table = routing_table(plan, grouped=True)
    assert "model.layers.*.mlp.experts.gate_up_proj (48)" in table
    assert "stack split over dp_shard_mod_ep x ep, shared over dp_replicate" in table


def test_local_experts_are_not_exchanged_and_hide_the_exchange_of_others() -> None:
    plan = build_plan(plan_groups(MuonConfig(), qwen3_30b_a3b(3)), PlanOptions(), choose)
    exchanged = [plan.buckets[b].is_exchanged for b, _ in plan.slots]
    # Each exchange has local work before and after it.
    assert not exchanged[0]
    assert not any(here and following for here, following in pairwise(exchanged))
    local = [bucket for bucket in plan.buckets if not bucket.is_exchanged]
    assert {(b.rows, b.cols) for b in local} == {(1536, 2048), (2048, 768)}
    assert sum(b.owned_here(c) for b in local for c in b.chunks) == 2 * 16 * 48
