import copy
import io
import pickle

import pytest
import torch
from torch import nn

from tests.support.muon_reference import Rule, reference_step
from trainer.config.optim import MuonConfig
from trainer.errors import UserError
from trainer.optim.muon import Muon
from trainer.optim.options import MuonOptions
from trainer.optim.setup import group_settings
from trainer.optim.state import init_state

FP32 = MuonOptions(ns_dtype="float32")
GROUP_KEYS = {
    "params", "lr", "mu", "beta1", "beta2", "weight_decay", "cautious_wd", "algorithm", "step",
    "epsilon", "nesterov", "flatten", "adjust_lr",
}  # fmt: skip


def tensors(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (6, 4), "mlp.experts.down_proj": (3, 4, 8), "norm": (5,), "embed": (7, 4)}
    named = {}
    for name, shape in shapes.items():
        parameter = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        parameter.grad = torch.randn(shape, generator=generator).to(dtype)
        named[name] = parameter
    return named


def build(named, options=FP32, **settings):
    muon = [(n, p) for n, p in named.items() if n not in ("norm", "embed")]
    adamw = [(n, p) for n, p in named.items() if n in ("norm", "embed")]
    groups = [{"params": muon}, {"params": adamw, "algorithm": "adamw"}]
    return Muon(groups, **settings, options=options)


def snapshot(optimizer):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return copy.deepcopy([(p.detach(), optimizer.state[p]) for p in parameters])


def assert_same(first, second) -> None:
    for (a, state_a), (b, state_b) in zip(first, second, strict=True):
        assert torch.equal(a, b)
        for key, value in state_a.items():
            assert torch.equal(value, state_b[key])


@pytest.mark.parametrize("finite", [None, torch.tensor(True)], ids=["no flag", "finite"])
@pytest.mark.parametrize("impl", ["stacked", "per_matrix"])
@pytest.mark.parametrize("nesterov", [False, True], ids=["plain", "nesterov"])
def test_a_step_follows_the_update_rule(finite, impl, nesterov) -> None:
    named = tensors()
    weight = named["a"]
    expected, _ = reference_step(
        weight.detach(), torch.zeros_like(weight), weight.grad, Rule(nesterov=nesterov)
    )
    options = MuonOptions(ns_dtype="float32", impl=impl)
    build(named, options, lr=0.02, weight_decay=0.1, nesterov=nesterov).step(finite=finite)
    # float32 against float64.
    assert (weight.detach() - expected).norm() / expected.norm() < 1e-6


@pytest.mark.parametrize("gradient", ["nan", "inf"])
@pytest.mark.parametrize("impl", ["stacked", "per_matrix"])
@pytest.mark.parametrize("cautious_wd", [False, True], ids=["plain", "cautious"])
def test_a_non_finite_step_changes_nothing(gradient, impl, cautious_wd) -> None:
    named = tensors()
    optimizer = build(named, MuonOptions(ns_dtype="float32", impl=impl), cautious_wd=cautious_wd)
    optimizer.step(finite=torch.tensor(True))
    before = snapshot(optimizer)
    for parameter in named.values():
        parameter.grad.flatten()[1] = float(gradient)
    optimizer.step(finite=torch.tensor(False))
    assert not optimizer.settle()
    assert not optimizer.settle()
    assert_same(before, snapshot(optimizer))
    assert [group["step"] for group in optimizer.param_groups] == [1, 1]


@pytest.mark.parametrize("impl", ["stacked", "per_matrix"])
@pytest.mark.parametrize("adjust_lr", ["rms_norm", "spectral_norm", None])
def test_parameters_without_elements_are_stepped_over(impl, adjust_lr) -> None:
    shapes = [(0, 4), (4, 0), (0, 3, 4), (3, 0, 4), (3, 4, 0), (4, 4)]
    found = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    options = MuonOptions(ns_dtype="float32", impl=impl, stats_interval=1)
    optimizer = Muon(found, adjust_lr=adjust_lr, options=options)
    for parameter in found:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert optimizer.phase_times()()["optim/update_rms/group0"] > 0
    assert not torch.equal(found[-1], torch.ones(4, 4))
    assert optimizer.price().num_collectives == 0


def test_hooks_of_a_load_have_their_say() -> None:
    optimizer, found = build(tensors()), []
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())

    def halve(_, state_dict):
        for state in state_dict["state"].values():
            state["momentum"] = state["momentum"].double() / 2
        return state_dict

    resumed = build(tensors())
    resumed.register_load_state_dict_pre_hook(halve)
    resumed.register_load_state_dict_post_hook(lambda o: found.append(snapshot(o)))
    resumed.load_state_dict(copy.deepcopy(saved))
    for number, (_, state) in enumerate(found[0]):
        assert torch.equal(state["momentum"], saved["state"][number]["momentum"].double() / 2)


def test_the_next_step_and_state_dict_settle_by_themselves() -> None:
    optimizer = build(tensors())
    optimizer.step(finite=torch.tensor(False))
    optimizer.step(finite=torch.tensor(True))
    assert optimizer.param_groups[0]["step"] == 1
    optimizer.step(finite=torch.tensor(False))
    assert optimizer.state_dict()["param_groups"][0]["step"] == 1
    assert optimizer.settle() is False


def test_the_flag_gives_bitwise_the_same_step() -> None:
    with_flag, without = build(tensors()), build(tensors())
    for _ in range(3):
        with_flag.step(finite=torch.tensor(True))
        without.step()
    assert_same(snapshot(with_flag), snapshot(without))


@pytest.mark.parametrize("name", ["a", "norm"])
def test_a_parameter_without_a_gradient_is_left_alone(name) -> None:
    named = tensors()
    named[name].grad = None
    optimizer = build(named)
    before = named[name].detach().clone()
    optimizer.step(finite=torch.tensor(True))
    assert torch.equal(named[name], before)
    assert not optimizer.state[named[name]]["momentum"].any()


@pytest.mark.parametrize("ns_dtype", ["float32", "bfloat16", "float16"])
def test_a_zero_gradient_gives_weight_decay_alone(ns_dtype) -> None:
    named = tensors()
    for parameter in named.values():
        parameter.grad.zero_()
    before = named["mlp.experts.down_proj"].detach().clone()
    build(named, MuonOptions(ns_dtype=ns_dtype), lr=0.1, weight_decay=0.5).step()
    assert torch.equal(named["mlp.experts.down_proj"], before * (1 - 0.1 * 0.5))


def test_one_zero_expert_does_not_touch_its_neighbours() -> None:
    one, other = tensors(), tensors()
    for named in (one, other):
        named["mlp.experts.down_proj"].grad[1] = 0
    other["mlp.experts.down_proj"].grad[1] = 1e30
    build(one).step()
    build(other).step()
    kept = torch.tensor([0, 2])
    assert torch.equal(one["mlp.experts.down_proj"][kept], other["mlp.experts.down_proj"][kept])


def test_a_step_does_not_write_to_gradients() -> None:
    named = tensors()
    before = {name: parameter.grad.clone() for name, parameter in named.items()}
    build(named, MuonOptions()).step(finite=torch.tensor(True))
    for name, parameter in named.items():
        assert torch.equal(parameter.grad, before[name])


def test_groups_and_state_have_dions_keys_from_construction() -> None:
    named = tensors(torch.bfloat16)
    optimizer = build(named)
    assert all(set(group) == GROUP_KEYS for group in optimizer.param_groups)
    assert set(optimizer.state[named["a"]]) == {"momentum"}
    assert set(optimizer.state[named["norm"]]) == {"momentum", "variance", "step_dev"}
    assert optimizer.state[named["a"]]["momentum"].dtype == torch.bfloat16
    assert optimizer.state[named["norm"]]["step_dev"].dtype == torch.float32


def test_a_saved_state_continues_bit_for_bit() -> None:
    saved, straight = build(tensors()), build(tensors())
    saved.step()
    straight.step()
    buffer = io.BytesIO()
    torch.save(saved.state_dict(), buffer)
    buffer.seek(0)
    named = tensors()
    for parameter, (weight, _) in zip(named.values(), snapshot(saved), strict=True):
        parameter.data.copy_(weight)
    resumed = build(named)
    resumed.load_state_dict(torch.load(buffer))
    resumed.step()
    straight.step()
    assert_same(snapshot(resumed), snapshot(straight))


def test_either_implementation_loads_the_others_state() -> None:
    stacked = build(tensors())
    stacked.step()
    other = build(tensors(), MuonOptions(ns_dtype="float32", impl="per_matrix"))
    other.load_state_dict(stacked.state_dict())
    assert other.param_groups[0]["step"] == 1


def test_loaded_momentum_keeps_its_dtype_and_steps() -> None:
    wide = build(tensors())
    wide.step()
    named = tensors(torch.bfloat16)
    narrow = build(named)
    narrow.load_state_dict(wide.state_dict())
    for parameter in named.values():
        assert narrow.state[parameter]["momentum"].dtype == torch.float32
    narrow.step(finite=torch.tensor(True))
    assert narrow.state[named["norm"]]["step_dev"] == 2


def test_an_older_state_without_step_dev_goes_on_from_the_groups_step() -> None:
    optimizer = build(tensors())
    for _ in range(5):
        optimizer.step()
    state = optimizer.state_dict()
    for entry in state["state"].values():
        entry.pop("step_dev", None)
    named = tensors()
    resumed = build(named)
    resumed.load_state_dict(state)
    assert resumed.state[named["norm"]]["step_dev"] == 5


def test_settings_outlive_a_load_and_lr_comes_with_it() -> None:
    saved = build(tensors(), lr=0.5, mu=0.1)
    resumed = build(tensors(), lr=0.01, mu=0.9)
    resumed.load_state_dict(saved.state_dict())
    assert (resumed.param_groups[0]["mu"], resumed.param_groups[0]["lr"]) == (0.9, 0.5)
    resumed.reapply_settings()
    assert resumed.param_groups[0]["lr"] == 0.01


def test_settings_are_those_of_construction_though_a_schedule_writes_into_tensors() -> None:
    optimizer = build(tensors(), lr=torch.tensor(0.5))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    optimizer.reapply_settings()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_state_of_other_parameters_is_refused() -> None:
    named = tensors()
    state = build(named).state_dict()
    state["state"][0]["momentum"] = torch.zeros(4, 6)
    with pytest.raises(UserError, match=r"momentum 0 has shape \[4, 6\]"):
        build(tensors()).load_state_dict(state)
    del state["param_groups"][1]
    with pytest.raises(UserError, match=r"\('adamw', 2\)"):
        build(tensors()).load_state_dict(state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -0.1}, "lr=-0.1"),
        ({"mu": 1.0}, "mu=1.0"),
        ({"betas": (0.9, 1.0)}, "beta2=1.0"),
        ({"weight_decay": float("nan")}, "weight_decay=nan"),
        ({"adjust_lr": "rms"}, "adjust_lr='rms'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_impossible_settings_are_refused(settings, message) -> None:
    with pytest.raises(UserError, match=message):
        build(tensors(), **settings)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"ns_steps": 0}, "optim.ns_steps=0"),
        ({"ns_dtype": "float8"}, "optim.ns_dtype='float8'"),
        ({"impl": "fast"}, "optim.impl='fast'"),
        ({"replicate": "both"}, "optim.replicate='both'"),
        ({"max_stack_gib": 0.0}, "optim.max_stack_gib=0.0"),
        ({"max_stack_gib": float("inf")}, "optim.max_stack_gib=inf"),
        ({"stats_interval": -1}, "optim.stats_interval=-1"),
        ({"split_gate_up": "yes"}, "optim.split_gate_up='yes'"),
        ({"split_gate_up": True}, r"optim.split_gate_up=true: no parameter is a fused gate"),
        ({"kernel": "symmetric"}, "symmetric"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_impossible_options_are_refused_when_the_optimizer_is_built(option, message) -> None:
    with pytest.raises(UserError, match=message):
        build(tensors(), MuonOptions(**option))


def test_a_vector_in_a_muon_group_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"parameter norm of shape \[5\]"):
        Muon([("norm", nn.Parameter(torch.ones(5)))])


@pytest.mark.parametrize("impl", ["stacked", "per_matrix"])
def test_momentum_loads_whatever_its_strides(impl) -> None:
    """Momentum of a channels-last model goes on as the same numbers of a contiguous one do."""
    draws = torch.randn(5, 8, 4, 3, 3, generator=torch.Generator().manual_seed(0))

    def train(memory_format: torch.memory_format) -> torch.Tensor:
        weight = nn.Parameter(draws[0].clone())
        options = MuonOptions(impl=impl, ns_dtype="float32")
        optimizer = Muon([("conv", weight)], lr=0.1, flatten=True, options=options)
        weight.grad = draws[1].clone()
        optimizer.step()
        saved = optimizer.state_dict()
        momentum = saved["state"][0]["momentum"]
        saved["state"][0]["momentum"] = momentum.to(memory_format=memory_format)
        optimizer.load_state_dict(saved)
        for gradient in draws[2:]:
            weight.grad = gradient.clone()
            optimizer.step()
        return weight.detach()

    scattered, contiguous = train(torch.channels_last), train(torch.contiguous_format)
    assert torch.equal(scattered, contiguous)


def test_a_memory_format_changed_later_is_refused() -> None:
    weight = nn.Parameter(torch.randn(8, 4, 3, 3))
    optimizer = Muon([("conv", weight)], flatten=True, options=MuonOptions(ns_dtype="float32"))
    weight.data = weight.data.to(memory_format=torch.channels_last)
    weight.grad = torch.randn(8, 4, 3, 3)
    with pytest.raises(UserError, match=r"memory format was changed after the optimizer was built"):
        optimizer.step()


def test_groups_cannot_be_added_later() -> None:
    with pytest.raises(UserError, match="add_param_group"):
        build(tensors()).add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})


@pytest.mark.parametrize("copier", [copy.deepcopy, pickle.dumps], ids=["copy", "pickle"])
def test_copies_that_torch_would_make_without_a_plan_are_refused(copier) -> None:
    with pytest.raises(TypeError, match="build another"):
        copier(build(tensors()))


def test_a_schedule_that_leaves_its_range_is_refused_before_the_step() -> None:
    optimizer = build(tensors())
    before = snapshot(optimizer)
    optimizer.param_groups[1]["lr"] = float("nan")
    with pytest.raises(UserError, match="lr=nan"):
        optimizer.step()
    assert_same(before, snapshot(optimizer))


def test_a_gradient_is_checked_when_it_first_appears() -> None:
    named = tensors()
    gradient, named["a"].grad = named["a"].grad, None
    optimizer = build(named)
    optimizer.step()
    named["a"].grad = gradient.to_sparse()
    with pytest.raises(UserError, match="gradient of a is sparse"):
        optimizer.step()


def test_torchs_schedulers_drive_the_learning_rate() -> None:
    named, by_hand = tensors(), tensors()
    optimizer, other = build(named, lr=0.5), build(by_hand, lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: [1.0, 0.5, 0.0][step])
    for factor in (1.0, 0.5, 0.0):
        for group in other.param_groups:
            group["lr"] = 0.5 * factor
        before = snapshot(optimizer)
        optimizer.step()
        other.step()
        if factor:
            scheduler.step()
    for a, b in zip(named.values(), by_hand.values(), strict=True):
        assert torch.equal(a, b)
    # A learning rate of zero moves momentum alone.
    for (weight, state), (now, now_state) in zip(before, snapshot(optimizer), strict=True):
        assert torch.equal(weight, now)
        assert not torch.equal(state["momentum"], now_state["momentum"])


def test_weight_decay_may_be_a_tensor() -> None:
    first, second = tensors(), tensors()
    build(first, weight_decay=0.3, cautious_wd=True).step()
    optimizer = build(second, weight_decay=0.3, cautious_wd=True)
    for group in optimizer.param_groups:
        group["weight_decay"] = torch.tensor(0.3, dtype=torch.float64)
    optimizer.step()
    for a, b in zip(first.values(), second.values(), strict=True):
        assert torch.equal(a, b)


def test_a_transposed_weight_is_updated_in_place() -> None:
    weight, plain = nn.Parameter(torch.randn(4, 6).T), None
    plain = nn.Parameter(weight.detach().contiguous())
    weight.grad = torch.randn(6, 4)
    plain.grad = weight.grad.clone()
    for parameter in (weight, plain):
        Muon([parameter], options=FP32).step()
    assert torch.allclose(weight, plain, atol=1e-6)


@pytest.mark.parametrize("impl", ["stacked", "per_matrix"])
def test_phase_times_and_statistics_describe_the_step(impl) -> None:
    options = MuonOptions(impl=impl, ns_dtype="float32", ns_steps=12, stats_interval=2)
    optimizer = build(tensors(), options)
    optimizer.step()
    assert set(optimizer.phase_times()()) == {
        f"optim/{phase}_ms"
        for phase in ("momentum", "newton_schulz", "exchange", "exchange_exposed", "update")
    }
    optimizer.step()
    metrics = optimizer.phase_times()()
    assert metrics["optim/newton_schulz_ms"] > 0
    # Orthogonal rows of n columns have RMS 1 / sqrt(n), which rms_norm scales to 0.2.
    assert metrics["optim/update_rms/group0"] == pytest.approx(0.2, rel=0.1)
    assert metrics["optim/update_spectral_norm/group0"] == pytest.approx(0.2 * 8**0.5, rel=0.1)
    assert optimizer.timings()["optim/momentum_ms"] > 0


@pytest.mark.parametrize("impl", ["stacked", "per_matrix"])
@pytest.mark.parametrize("shape", [(5,), (0, 4), (3, 0)], ids=str)
def test_without_matrices_adamw_steps_once(impl, shape) -> None:
    weight = nn.Parameter(torch.zeros(4))
    groups = [{"params": [weight], "algorithm": "adamw"}]
    if len(shape) > 1:
        groups.append({"params": [nn.Parameter(torch.zeros(shape))]})
    for group in groups:
        group["params"][0].grad = torch.ones_like(group["params"][0])
    optimizer = Muon(groups, lr=0.25, options=MuonOptions(impl=impl))
    optimizer.step()
    assert optimizer.state[weight]["step_dev"] == 1
    # Corrected for bias, the first step is the learning rate.
    assert torch.allclose(weight, torch.full((4,), -0.25))


def test_a_closure_is_evaluated_with_gradients() -> None:
    named = tensors()

    def closure():
        loss = named["a"].square().sum()
        loss.backward()
        return loss.item()

    assert build(named).step(closure) > 0


def test_experts_are_never_flattened_by_config() -> None:
    config = MuonConfig(flatten=True, adamw_lr=0.5)
    assert group_settings("experts", config)["flatten"] is False
    assert group_settings("dense", config)["flatten"] is True
    assert group_settings("adamw", config)["lr"] == 0.5


def test_fresh_state_is_zero() -> None:
    state = init_state(torch.ones(2, 2), "adamw")
    assert not any(value.any() for value in state.values())
