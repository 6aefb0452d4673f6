from itertools import product

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from tests.support.sharding import distribute
from tests.support.threads import run_threads
from trainer.errors import UserError
from trainer.optim.agreement import plan_agreements
from trainer.optim.presence import Presence
from trainer.optim.spec import describe_parameters

SIZES = (2, 2)
PLACEMENTS = [(a, b) for a, b in product((Replicate(), Shard(0)), (Replicate(), Shard(1)))]


def agree(has_by_rank, shapes):
    """Return what a rank learns: (step allowed, gradient somewhere by parameter, refusal)."""
    mesh = init_device_mesh("cpu", SIZES, mesh_dim_names=("a", "b"))
    named = [
        (f"p{i}", distribute(torch.zeros(shape), mesh, placements))
        for i, (shape, placements) in enumerate(zip(shapes, PLACEMENTS, strict=True))
    ]
    specs, meshes = describe_parameters(named)
    presence = Presence(plan_agreements(specs), meshes, named)
    has_here = has_by_rank[dist.get_rank()]
    presence.launch(has_here)
    allowed = presence.gate_step(None)
    gates = presence.gate_parameters(None)
    try:
        refusal = presence.refuse_mixed()
    except UserError as error:
        refusal = str(error).split(" had ")[0]
    assert allowed is not None
    # A rank that has a gradient knows without asking: its gate is open.
    assert all(gate is None for gate, has in zip(gates, has_here, strict=True) if has)
    return bool(allowed), [gate is None or bool(gate) for gate in gates], refusal


def expected(has_by_rank, shapes):
    """What all ranks should learn, from rules written out over coordinates."""
    mixed, somewhere = [], []
    for i, (shape, placements) in enumerate(zip(shapes, PLACEMENTS, strict=True)):
        by_shard = {}
        for rank, coordinate in enumerate(product(*map(range, SIZES))):
            shard = tuple(
                None if p.is_replicate() else c for c, p in zip(coordinate, placements, strict=True)
            )
            # A dim of one row (column) leaves the second rank of its axis nothing.
            if all(shape[d] > 1 or not c for d, c in enumerate(shard)):
                by_shard.setdefault(shard, set()).add(has_by_rank[rank][i])
        mixed += [f"p{i}"] if any(len(found) == 2 for found in by_shard.values()) else []
        somewhere.append(any(has[i] for has in has_by_rank))
    others = f" and {len(mixed) - 1} more" if len(mixed) > 1 else ""
    return not mixed, somewhere, f"parameter {mixed[0]}{others}" if mixed else None


@settings(max_examples=60, deadline=None)
@given(
    has_by_rank=st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=4, max_size=4),
    shapes=st.lists(st.sampled_from([(4, 4), (1, 4), (4, 1)]), min_size=4, max_size=4),
)
def test_all_ranks_learn_who_has_gradients_and_which_copies_differ(has_by_rank, shapes) -> None:
    right = expected(has_by_rank, shapes)
    assert run_threads(4, agree, has_by_rank, shapes) == [right] * 4


def gates_of(is_open):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    named = [("p", distribute(torch.zeros(4), mesh, (Shard(0),))), ("plain", torch.zeros(4))]
    specs, meshes = describe_parameters(named)
    presence = Presence(plan_agreements(specs), meshes, named)
    presence.launch([dist.get_rank() == 0, False])
    # No copies, so nothing but the flag can close the step.
    assert presence.gate_step(is_open) is is_open
    gates = presence.gate_parameters(is_open)
    presence.refuse_mixed()
    assert [presence.may_be_elsewhere(index) for index in (0, 1)] == [True, False]
    return [gate is None or bool(gate) for gate in gates]


@pytest.mark.parametrize("is_open", [None, torch.tensor(True), torch.tensor(False)], ids=str)
def test_a_missing_gradient_counts_only_if_the_step_is_open(is_open) -> None:
    right = [is_open is None or bool(is_open), False]
    assert run_threads(2, gates_of, is_open) == [right] * 2


def test_one_process_needs_no_group() -> None:
    named = [("p", torch.zeros(4)), ("q", torch.zeros(4))]
    specs, meshes = describe_parameters(named)
    presence = Presence(plan_agreements(specs), meshes, named)
    presence.launch([False, True])
    assert presence.gate_step(None) is None
    missing, there = presence.gate_parameters(None)
    assert (bool(missing), there) == (False, None)
    assert presence.widest_group is None
