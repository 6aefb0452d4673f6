import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from tests.support.sharding import distribute, shard_of
from tests.support.threads import run_threads
from trainer.errors import UserError
from trainer.optim.muon import Muon
from trainer.optim.state import local
from trainer.optim.torch_optimizers import SGD, AdamW


def parameters():
    generator = torch.Generator().manual_seed(0)
    found = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (5,))]
    for parameter in found:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return found


PAIRS = [
    pytest.param(
        lambda p: AdamW(p, lr=0.1, betas=(0.8, 0.9), epsilon=1e-6, weight_decay=0.2),
        lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2),
        id="adamw",
    ),
    pytest.param(
        lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.2, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.2, nesterov=True),
        id="sgd with momentum",
    ),
    pytest.param(lambda p: SGD(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1), id="sgd"),
]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_steps_are_torchs(ours, theirs) -> None:
    first, second = parameters(), parameters()
    mine, reference = ours(first), theirs(second)
    for _ in range(3):
        mine.step(finite=torch.tensor(True))
        reference.step()
    for a, b in zip(first, second, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("num_before", [0, 2])
def test_a_non_finite_step_changes_nothing(ours, theirs, num_before) -> None:
    found = parameters()
    optimizer = ours(found)
    for _ in range(num_before):
        optimizer.step(finite=torch.tensor(True))
    before = copy.deepcopy([(p.detach(), optimizer.state[p]) for p in found])
    gradients = [p.grad.clone() for p in found]
    found[0].grad[0, 0] = float("nan")
    optimizer.step(finite=torch.tensor(False))
    assert not optimizer.settle()
    for parameter, (weight, state) in zip(found, before, strict=True):
        assert torch.equal(parameter, weight)
        for key, value in state.items():
            assert torch.equal(optimizer.state[parameter][key], value)
    for parameter, gradient in zip(found, gradients, strict=True):
        parameter.grad.copy_(gradient)
    optimizer.step(finite=torch.tensor(True))
    assert optimizer.settle()
    twin = parameters()
    straight = theirs(twin)
    for _ in range(num_before + 1):
        straight.step()
    assert torch.allclose(found[0], twin[0], atol=1e-6)


def test_states_are_torchs_own_both_ways() -> None:
    first, second = parameters(), parameters()
    ours, theirs = AdamW(first), torch.optim.AdamW(second)
    ours.step()
    theirs.step()
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    ours.load_state_dict(
        copy.deepcopy(torch.optim.AdamW(parameters()).state_dict())
        | {"state": copy.deepcopy(theirs.state_dict()["state"])}
    )
    assert ours.state[first[0]]["step"] == 1


def test_a_state_of_sgd_goes_on_in_torchs_own() -> None:
    first, second = parameters(), parameters()
    settings = {"lr": 0.1, "momentum": 0.9, "nesterov": True}
    ours, theirs = SGD(first, **settings), torch.optim.SGD(second, **settings)
    ours.step()
    theirs.step()
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    ours.step()
    theirs.step()
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b)
    older = ours.state_dict()
    del older["param_groups"][0]["dampening"]
    ours.load_state_dict(older)
    ours.step()


def test_dampening_is_refused() -> None:
    with pytest.raises(UserError, match=r"dampening=0\.5: SGD here has none"):
        SGD([{"params": parameters(), "dampening": 0.5}])


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_a_fresh_state_of_torch_loads_and_what_it_lacks_is_made(ours, theirs) -> None:
    first, second = parameters(), parameters()
    mine, reference = ours(first), theirs(second)
    mine.step()
    mine.load_state_dict(theirs(parameters()).state_dict())
    for parameter, start in zip(first, parameters(), strict=True):
        parameter.detach().copy_(start.detach())
    for optimizer in (mine, reference):
        optimizer.step()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("gradient_layout", ["rows", "columns", "repeated"])
def test_elements_are_paired_by_place_whatever_the_strides(ours, theirs, gradient_layout) -> None:
    first, second = parameters(), parameters()
    first[0].data = first[0].data.T.clone().T
    match gradient_layout:
        case "columns":
            first[0].grad = first[0].grad.T.clone().T
        case "repeated":
            first[0].grad = first[0].grad[:1].expand(4, 3)
            second[0].grad = first[0].grad.clone()
    mine, reference = ours(first), theirs(second)
    for _ in range(2):
        mine.step()
        reference.step()
    assert torch.allclose(first[0], second[0], atol=1e-6)


def test_phase_times_name_the_update_alone() -> None:
    optimizer = AdamW(parameters())
    optimizer.step()
    assert set(optimizer.phase_times()()) == {"optim/update_ms"}
    assert set(optimizer.timings()) == {"optim/update_ms"}


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_copies_that_torch_would_make_without_a_gate_are_refused(ours, theirs) -> None:
    with pytest.raises(TypeError, match="build another"):
        copy.deepcopy(ours(parameters()))


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_a_group_that_comes_later_is_refused(ours, theirs) -> None:
    optimizer = ours(parameters())
    with pytest.raises(UserError, match=r"add_param_group after construction: .* plans once"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})


@pytest.mark.parametrize(
    ("build", "torchs", "message"),
    [
        (AdamW, lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad=True"),
        (AdamW, lambda p: torch.optim.AdamW(p, maximize=True), "maximize=True"),
        (SGD, lambda p: torch.optim.SGD(p, momentum=0.9, dampening=0.5), r"dampening=0\.5"),
    ],
    ids=["amsgrad", "maximize", "dampening"],
)
def test_a_state_of_another_update_is_refused(build, torchs, message) -> None:
    with pytest.raises(UserError, match=f"was made with {message}, which {build.__name__} here"):
        build(parameters()).load_state_dict(torchs(parameters()).state_dict())


CHANGES = {
    "append": lambda members: members.append(nn.Parameter(torch.ones(2, 2))),
    "remove": lambda members: members.pop(),
    "replace": lambda members: members.__setitem__(0, nn.Parameter(members[0].detach().clone())),
    "reverse": lambda members: members.reverse(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("build", [SGD, AdamW, Muon])
def test_parameters_changed_behind_its_back_are_refused(build, change) -> None:
    named = [(f"w{i}", nn.Parameter(torch.randn(4, 4))) for i in range(3)]
    optimizer = build(named, lr=0.1)
    change(optimizer.param_groups[0]["params"])
    with pytest.raises(UserError, match="that are not the 3 of construction"):
        optimizer.step()


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_a_flag_of_another_type_is_refused(ours, theirs) -> None:
    with pytest.raises(UserError, match="finite=True"):
        ours(parameters()).step(finite=True)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p: AdamW(p, lr=-1.0), "lr=-1.0: must be a finite number"),
        (lambda p: AdamW(p, betas=(0.9, 1.0)), r"beta2=1.0: must be a number in \[0, 1\)"),
        (lambda p: AdamW(p, epsilon=float("nan")), "epsilon=nan"),
        (lambda p: SGD(p, momentum=1.0), "momentum=1.0"),
        (lambda p: SGD(p, weight_decay=float("inf")), "weight_decay=inf"),
        (lambda p: SGD(p, nesterov=True), "optim.nesterov=true: there is no momentum"),
        (lambda p: SGD([{"params": p, "mu": 0.9}]), "group0 sets mu: not a hyperparameter"),
    ],
    ids=["lr", "betas", "epsilon", "momentum", "weight decay", "nesterov", "unknown"],
)
def test_what_cannot_be_honoured_is_refused(build, message) -> None:
    with pytest.raises(UserError, match=message):
        build(parameters())


def test_a_schedule_that_leaves_its_range_is_refused_before_the_step() -> None:
    found = parameters()
    optimizer = AdamW(found)
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(UserError, match="lr=nan"):
        optimizer.step()
    assert all(map(torch.equal, found, parameters()))


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_a_gradient_that_momentum_cannot_take_is_refused(ours, theirs) -> None:
    found = parameters()
    found[0].grad = found[0].grad.to_sparse()
    with pytest.raises(UserError, match="gradient of parameter0 is sparse"):
        ours(found).step()


def shards(placements):
    """Return two parameters, one with a gradient of its own, and the mesh they lie on."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    found = parameters()
    made = [nn.Parameter(distribute(p.detach(), mesh, placements)) for p in found]
    for parameter, full in zip(made, found, strict=True):
        parameter.grad = distribute(full.grad, mesh, placements)
    return made, mesh


def step_without_one_shards_gradient(ours, theirs) -> float:
    placements = (Replicate(), Shard(0))
    made, mesh = shards(placements)
    reference = parameters()
    # Rows 2 and 3 of the first parameter, on both copies of the second shard.
    if mesh.get_coordinate()[1] == 1:
        made[0].grad = None
    reference[0].grad[2:] = 0
    first, second = ours(made), theirs(reference)
    for _ in range(2):
        first.step(finite=torch.tensor(True))
        second.step()
    assert first.settle()
    return max(
        float((local(p.data) - shard_of(q.detach(), mesh, placements)).abs().max())
        for p, q in zip(made, reference, strict=True)
    )


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_a_gradient_that_some_ranks_lack_counts_as_zeros_there(ours, theirs) -> None:
    assert max(run_threads(4, step_without_one_shards_gradient, ours, theirs)) < 1e-6


def step_with_differing_copies(ours) -> list[bool]:
    made, mesh = shards((Replicate(), Shard(0)))
    optimizer = ours([(f"p{i}", p) for i, p in enumerate(made)])
    before = [local(p.data).clone() for p in made]
    if mesh.get_coordinate() == (1, 0):
        made[1].grad = None
    optimizer.step()
    with pytest.raises(UserError, match="parameter p1 had a gradient on some"):
        optimizer.settle()
    assert not optimizer.settle()
    return [torch.equal(local(p.data), old) for p, old in zip(made, before, strict=True)]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_copies_that_differ_in_their_gradients_are_refused(ours, theirs) -> None:
    assert run_threads(4, step_with_differing_copies, ours) == [[True, True]] * 4
