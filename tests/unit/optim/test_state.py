import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from tests.support.sharding import distribute
from tests.support.threads import run_threads
from trainer.errors import UserError
from trainer.optim.state import (
    as_matrices,
    check_loaded,
    complete_state,
    init_state,
    restore_dtypes,
    view_as_matrices,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_has_dions_keys_in_the_parameters_dtype(dtype) -> None:
    weight = nn.Parameter(torch.ones(2, 3, dtype=dtype))
    muon, adamw = init_state(weight, "muon"), init_state(weight, "adamw")
    assert {k: v.dtype for k, v in muon.items()} == {"momentum": dtype}
    assert {k: (v.dtype, v.shape) for k, v in adamw.items()} == {
        "momentum": (dtype, weight.shape),
        "variance": (dtype, weight.shape),
        "step_dev": (torch.float32, torch.Size()),
    }
    assert not any(
        value.any() or value.requires_grad for value in (*muon.values(), *adamw.values())
    )


@pytest.mark.parametrize(
    ("shape", "flatten", "expected"),
    [
        ((4, 6), False, (1, 4, 6)),
        ((4, 6), True, (1, 4, 6)),
        ((3, 4, 6), False, (3, 4, 6)),
        ((3, 4, 6), True, (1, 3, 24)),
        ((2, 3, 4, 5), False, (6, 4, 5)),
        ((2, 3, 4, 5), True, (1, 2, 60)),
        ((0, 4, 6), False, (0, 4, 6)),
    ],
    ids=str,
)
def test_matrices_are_a_view(shape, flatten, expected) -> None:
    tensor = torch.zeros(shape)
    matrices_BMN = as_matrices(tensor, flatten=flatten)
    assert matrices_BMN.shape == expected
    matrices_BMN.fill_(1)
    assert bool((tensor == 1).all())


def test_what_is_written_to_is_a_view_or_refused() -> None:
    tensor = torch.zeros(2, 3, 4, 5)
    view_as_matrices(tensor, flatten=True).fill_(1)
    assert bool((tensor == 1).all())
    scattered = tensor.to(memory_format=torch.channels_last)
    assert as_matrices(scattered, flatten=True).shape == (1, 2, 60)
    with pytest.raises(UserError, match=r"strides \(60, 1, 15, 3\), no view of matrices"):
        view_as_matrices(scattered, flatten=True)


def groups_of(*members):
    return [
        {"algorithm": algorithm, "params": params, "step": 3, "lr": 0.1}
        for algorithm, params in members
    ]


def test_a_state_that_fits_by_position_is_accepted() -> None:
    groups = groups_of(("muon", [torch.ones(2, 3)]), ("adamw", [torch.ones(4), torch.ones(5)]))
    loaded = {
        "param_groups": groups_of(("muon", [7]), ("adamw", [1, 9])),
        # A parameter without state, as of a run that never stepped it, says nothing.
        "state": {7: {"momentum": torch.ones(2, 3)}, 9: {"momentum": torch.ones(5)}},
    }
    check_loaded(loaded, groups)


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (groups_of(("muon", [0])), r"\[\('muon', 1\)\].*\[\('muon', 1\), \('adamw', 1\)\]"),
        (groups_of(("adamw", [0]), ("muon", [1])), r"\('adamw', 1\), \('muon', 1\)"),
        (groups_of(("muon", [0, 1]), ("adamw", [])), r"\('muon', 2\), \('adamw', 0\)"),
        (groups_of(("muon", [1]), ("adamw", [0])), r"momentum 0 has shape \[4\].* has \[2, 3\]"),
    ],
    ids=["a group less", "algorithms swapped", "split otherwise", "shapes swapped"],
)
def test_a_state_of_other_parameters_is_refused(saved, message) -> None:
    groups = groups_of(("muon", [torch.ones(2, 3)]), ("adamw", [torch.ones(4)]))
    state = {0: {"momentum": torch.ones(2, 3)}, 1: {"momentum": torch.ones(4)}}
    with pytest.raises(UserError, match=message):
        check_loaded({"param_groups": saved, "state": state}, groups)


@pytest.mark.parametrize(
    ("loaded", "lacking"),
    [
        ({}, "param_groups, state"),
        ({"state": {}, "param_groups": [{"params": [0], "lr": 0.1}]}, "algorithm, step"),
    ],
    ids=["nothing", "torch's AdamW"],
)
def test_a_state_of_another_kind_is_refused(loaded, lacking) -> None:
    with pytest.raises(UserError, match=f"lacks {lacking}: it is not a state of Muon"):
        check_loaded(loaded, groups_of(("muon", [torch.ones(2, 3)])))


def test_a_variance_of_another_shape_is_refused() -> None:
    groups = groups_of(("adamw", [torch.ones(4)]))
    loaded = {"param_groups": groups_of(("adamw", [0])), "state": {0: {"variance": torch.ones(5)}}}
    with pytest.raises(UserError, match=r"variance 0 has shape \[5\].* has \[4\]"):
        check_loaded(loaded, groups)


def load_plain_momentum_for_a_shard() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    weight = distribute(torch.ones(4, 2), mesh, (Shard(0),))
    momenta = [
        (torch.ones(4, 2), "lies as a plain tensor"),
        (distribute(torch.ones(4, 2), mesh, (Shard(1),)), r"lies as \(Shard\(dim=1\),\)"),
    ]
    for momentum, message in momenta:
        loaded = {"param_groups": groups_of(("muon", [0])), "state": {0: {"momentum": momentum}}}
        with pytest.raises(UserError, match=message):
            check_loaded(loaded, groups_of(("muon", [weight])))


def test_state_that_lies_otherwise_than_its_parameter_is_refused() -> None:
    run_threads(2, load_plain_momentum_for_a_shard)


def test_loaded_state_keeps_its_dtype_and_steps_are_float32() -> None:
    weight = torch.ones(3, dtype=torch.bfloat16)
    groups = groups_of(("adamw", [weight]))
    loaded = {
        "param_groups": groups_of(("adamw", [5])),
        "state": {5: {"momentum": torch.full((3,), 1 + 2.0**-20), "step_dev": torch.tensor(300)}},
    }
    # What torch's load leaves: everything in the parameter's dtype.
    state = {weight: {key: value.to(weight.dtype) for key, value in loaded["state"][5].items()}}
    restore_dtypes(state, groups, loaded)
    assert torch.equal(state[weight]["momentum"], loaded["state"][5]["momentum"])
    assert state[weight]["step_dev"].dtype == torch.float32
    assert state[weight]["step_dev"] == 300


@pytest.mark.parametrize(
    ("found", "steps"),
    [({"momentum": torch.ones(3), "variance": torch.ones(3)}, 41), ({}, 0)],
    ids=["older dion", "never stepped"],
)
def test_what_a_state_lacks_is_filled_in(found, steps) -> None:
    weight = torch.zeros(3)
    state = {weight: dict(found)}
    complete_state(state, {"algorithm": "adamw", "params": [weight], "step": 41})
    assert state[weight].keys() == {"momentum", "variance", "step_dev"}
    assert state[weight]["step_dev"] == steps
    assert bool(state[weight]["variance"].all()) == bool(found)
