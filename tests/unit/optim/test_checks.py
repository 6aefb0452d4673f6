import math
from collections.abc import Generator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.support.meshes import ones_on, two_by_two_mesh
from trainer.errors import UserError
from trainer.optim.checks import (
    GradientCheck,
    check_devices,
    check_flag,
    check_gradient,
    check_group,
    check_numbers,
    check_shard,
    check_stats,
    check_step_numbers,
    check_unchanged,
)
from trainer.optim.groups import NamedGroup
from trainer.optim.plan import PlannedGroup
from trainer.optim.spec import describe_parameters

GROUP = {
    "lr": 0.1, "mu": 0.9, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.0, "epsilon": 1e-8,
    "nesterov": False, "cautious_wd": False, "flatten": False, "algorithm": "muon",
    "adjust_lr": None, "step": 0,
}  # fmt: skip


def named(*parameters, **settings) -> NamedGroup:
    return NamedGroup("dense", tuple((f"p{i}", p) for i, p in enumerate(parameters)), settings)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e-9, None, "0.1", True], ids=repr)
@pytest.mark.parametrize("key", ["lr", "mu", "beta1", "beta2", "weight_decay", "epsilon"])
def test_hyperparameters_are_finite_numbers_of_at_least_zero(key, value) -> None:
    with pytest.raises(UserError, match=f"{key}={value!r}: must be a"):
        check_numbers({"lr": 0.1, key: value})
    with pytest.raises(UserError, match=f"{key}={value!r}: must be a"):
        check_step_numbers({**GROUP, key: value})


def test_a_tensor_of_two_numbers_is_none() -> None:
    with pytest.raises(UserError, match=r"lr=tensor\(\[1., 2.\]\): must be a finite number"):
        check_step_numbers({**GROUP, "lr": torch.tensor([1.0, 2.0])})


@pytest.mark.parametrize("value", [0, 0.0, torch.tensor(0.5), np.float32(0.5)], ids=repr)
def test_zero_and_tensors_are_numbers(value) -> None:
    check_step_numbers({**GROUP, "lr": value, "mu": value, "weight_decay": value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nesterov": "false"}, "nesterov='false': must be True or False"),
        ({"cautious_wd": 1}, "cautious_wd=1: must be"),
        ({"flatten": None}, "flatten=None: must be"),
        ({"algorithm": "adam"}, "algorithm='adam': choose 'muon' or 'adamw'"),
        ({"adjust_lr": "rms", "algorithm": "adamw"}, "adjust_lr='rms': choose 'rms_norm'"),
    ],
    ids=str,
)
def test_switches_and_algorithms_are_checked(change, message) -> None:
    with pytest.raises(UserError, match=message):
        check_group({**GROUP, **change}, named())


@pytest.mark.parametrize("key", ["learning_rate", "betas", "ns_steps"])
def test_a_hyperparameter_that_nothing_reads_is_refused(key) -> None:
    with pytest.raises(UserError, match=f"group dense sets {key}: not a hyperparameter"):
        check_group(GROUP, named(**{key: 1}))


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (torch.ones(3), r"p0 of shape \[3\] is no matrix"),
        (torch.ones(2, 2, dtype=torch.complex64), "p0 is of complex64"),
        (torch.ones(2, 2, dtype=torch.int64), "p0 is of int64"),
    ],
    ids=["vector", "complex", "integers"],
)
def test_members_are_float_matrices(parameter, message) -> None:
    with pytest.raises(UserError, match=message):
        check_group(GROUP, named(parameter))


@pytest.mark.parametrize("flatten", [False, True], ids=["stack", "flattened"])
def test_matrices_must_be_a_view_of_the_parameter(flatten) -> None:
    group, kernel = {**GROUP, "flatten": flatten}, torch.ones(4, 3, 2, 2)
    check_group(group, named(kernel))
    with pytest.raises(UserError, match=r"p0 of shape \[4, 3, 2, 2\] and strides .*contiguous"):
        check_group(group, named(kernel.to(memory_format=torch.channels_last)))


@pytest.mark.parametrize(
    ("key", "value"), [("algorithm", "adamw"), ("flatten", True), ("adjust_lr", "rms_norm")]
)
def test_what_the_plan_rests_on_cannot_change(key, value) -> None:
    planned = PlannedGroup("dense", "muon", (), flatten=False, adjust_lr=None)
    check_unchanged({**GROUP, "lr": 5.0}, planned)
    with pytest.raises(UserError, match=f"group dense: {key} was .* now {value!r}"):
        check_unchanged({**GROUP, key: value}, planned)


def test_parameters_have_memory_on_one_device() -> None:
    here = ("a", torch.ones(2))
    check_devices([here, ("b", nn.Parameter(torch.ones(2)))])
    with pytest.raises(UserError, match="parameter b is on meta"):
        check_devices([here, ("b", torch.ones(2, device="meta"))])


@pytest.mark.parametrize(
    "finite",
    [True, 1, torch.tensor(1), torch.tensor(1.0), torch.tensor([True])],
    ids=repr,
)
def test_a_flag_of_another_type_is_refused_before_anything_moves(finite) -> None:
    with pytest.raises(UserError, match=r"finite=.*must be a bool tensor of no dim"):
        check_flag(finite, torch.device("cpu"))


def test_a_flag_elsewhere_is_refused() -> None:
    with pytest.raises(UserError, match="finite is on cpu, the parameters are on cuda:1"):
        check_flag(torch.tensor(True), torch.device("cuda:1"))


def test_a_flag_may_be_missing() -> None:
    check_flag(None, torch.device("cuda:1"))
    check_flag(torch.tensor(False), torch.device("cpu"))


@pytest.fixture(scope="module")
def mesh() -> Generator[DeviceMesh]:
    with two_by_two_mesh() as mesh:
        yield mesh


def test_shards_dealt_otherwise_than_torch_deals_are_refused_by_name(mesh) -> None:
    for rows, is_right in ((2, True), (3, False)):
        # Of five rows over two ranks the second, which this one is along axis a, gets two.
        shard = DTensor.from_local(
            torch.ones(rows, 4), mesh, (Shard(0), Replicate()), run_check=False,
            shape=torch.Size((5, 4)), stride=(4, 1),
        )  # fmt: skip
        (spec,), _ = describe_parameters([("w", shard)])
        if is_right:
            check_shard(spec, shard)
            continue
        with pytest.raises(UserError, match=r"w of shape \[5, 4\] .*shape \[3, 4\] .*\[2, 4\]"):
            check_shard(spec, shard)


def test_a_gradient_that_lies_elsewhere_is_refused_by_name(mesh) -> None:
    parameter = nn.Parameter(ones_on(mesh, Replicate(), Shard(0)))
    parameter.grad = ones_on(mesh, Replicate(), Shard(0))
    check_gradient("w", parameter)
    others = [
        (ones_on(mesh, Shard(0), Replicate()), r"\(Shard\(dim=0\), Replicate\(\)\) over \(2, 2\)"),
        (ones_on(DeviceMesh("cpu", list(range(4))), Shard(0)), r"\(Shard\(dim=0\),\) over \(4,\)"),
        # As long as the whole parameter: its first rows would pass for this rank's.
        (torch.ones(parameter.shape), "a plain tensor"),
    ]
    for gradient, text in others:
        if gradient.shape != parameter.shape:
            gradient = DTensor.from_local(
                torch.ones(1, 4), gradient.device_mesh, gradient.placements, run_check=False
            )
        parameter.grad = gradient
        with pytest.raises(UserError, match=f"gradient of w lies as {text}.* the parameter as"):
            check_gradient("w", parameter)


def test_a_shards_gradient_on_a_whole_parameter_is_refused(mesh) -> None:
    parameter = nn.Parameter(torch.ones(4, 4))
    parameter.grad = ones_on(mesh, Replicate(), Shard(0))
    with pytest.raises(UserError, match="the parameter as a plain tensor"):
        check_gradient("w", parameter)


def test_each_gradient_is_checked_when_it_is_first_there() -> None:
    first, second = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    gradients = GradientCheck([("first", first), ("second", second)])
    first.grad = torch.ones(2, 2)
    gradients.check()
    second.grad = torch.eye(2).to_sparse()
    with pytest.raises(UserError, match="gradient of second is sparse"):
        gradients.check()


def test_sparse_gradients_are_refused_by_name() -> None:
    weight = nn.Parameter(torch.ones(4, 2))
    weight.grad = torch.eye(4, 2).to_sparse()
    with pytest.raises(UserError, match="gradient of w is sparse"):
        check_gradient("w", weight)


@pytest.mark.parametrize(
    ("meshes", "is_refused"),
    [
        ([], False),
        ([[0, 1, 2, 3]], False),
        ([[0, 1], [[0, 1], [2, 3]]], False),
        ([[0, 1], [1, 2, 3]], True),
    ],
    ids=str,
)
def test_statistics_need_a_mesh_that_holds_all_others(meshes, is_refused) -> None:
    found = [SimpleNamespace(mesh=torch.tensor(ranks)) for ranks in meshes]
    check_stats(0, found)
    if not is_refused:
        check_stats(2, found)
        return
    message = r"optim\.stats_interval=2: .* \[\[0, 1\], \[1, 2, 3\]\], none of which holds all"
    with pytest.raises(UserError, match=message):
        check_stats(2, found)
