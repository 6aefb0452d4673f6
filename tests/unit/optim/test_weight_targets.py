"""Updates made within the last product equal those of a pass of their own."""

from dataclasses import replace

import pytest
import torch

from trainer.optim import Muon, MuonOptions, options, weight_targets
from trainer.optim.kernels import KernelChoice, launch_counts, reset_launch_counts
from trainer.optim.kernels.launches import record_launch
from trainer.optim.kernels.products import torch_products
from trainer.optim.pricing import Price

SHAPES = {"wide": (3, 8, 16), "tall": (2, 24, 8), "alone": (16, 16), "late": (4, 8, 16)}


def torch_update(S_BMM, X_BMN, beta, weights_BMN, kept, step_size) -> None:
    """The contract of `Products.update`, in plain torch."""
    record_launch("test.update")
    assert kept.shape == step_size.shape == (1,)
    assert kept.dtype == step_size.dtype == weights_BMN.dtype == torch.float32
    update_BMN = S_BMM @ X_BMN + beta * X_BMN
    weights_BMN.copy_(weights_BMN * kept - step_size * update_BMN)


def fusing(*_) -> KernelChoice:
    def load_products():
        return replace(torch_products(), update=torch_update)

    return KernelChoice("dense", "a test's", False, load_products, fuses_update=True)


@pytest.fixture
def fuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "choose_kernel_of", fusing)
    monkeypatch.setattr(weight_targets, "MIN_ELEMENTS", 1)


def make(stats_interval=0, **settings) -> Muon:
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for name, shape in SHAPES.items():
        parameter = torch.nn.Parameter(torch.randn(shape, generator=generator))
        parameter.grad = torch.randn(shape, generator=generator)
        parameters.append((name, parameter))
    defaults = {"lr": 0.1, "weight_decay": 0.1}
    chosen = MuonOptions(ns_dtype="float32", stats_interval=stats_interval)
    return Muon(parameters, **(defaults | settings), options=chosen)


def weights(optimizer: Muon) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in optimizer.param_groups[0]["params"]]


def steps(optimizer: Muon, finite=None) -> list[torch.Tensor]:
    for _ in range(3):
        optimizer.step(finite=finite)
    return weights(optimizer)


def num_updates(optimizer: Muon) -> int:
    reset_launch_counts()
    optimizer.step()
    return launch_counts().get("test.update", 0)


@pytest.mark.parametrize("settings", [{}, {"nesterov": True}, {"adjust_lr": None}], ids=str)
def test_fused_updates_are_those_of_a_pass_apart(request, settings) -> None:
    apart = steps(make(**settings))
    request.getfixturevalue("fuses")
    reset_launch_counts()
    fused = steps(make(**settings))
    assert launch_counts()["test.update"] == 3 * len(SHAPES)
    for one, other in zip(fused, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("held", [float("nan"), float("inf")])
def test_a_shut_gate_leaves_weights_as_they_are(fuses, nesterov, held) -> None:
    optimizer = make(nesterov=nesterov)
    optimizer.step()
    before = [weight.clone() for weight in weights(optimizer)]
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.fill_(held)
    reset_launch_counts()
    optimizer.step(finite=torch.tensor(False))
    assert launch_counts()["test.update"] == len(SHAPES)
    assert all(map(torch.equal, weights(optimizer), before))
    assert not optimizer.settle()


def test_an_open_gate_changes_nothing(fuses) -> None:
    gated, free = steps(make(), torch.tensor(True)), steps(make())
    assert all(map(torch.equal, gated, free))


@pytest.mark.parametrize("gate", [None, torch.tensor(True)], ids=str)
def test_factors_do_not_depend_on_the_default_dtype(monkeypatch, gate) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        kept, step_size = weight_targets._gated(gate, 0.9998, 1e-3, torch.device("cpu"))
    finally:
        torch.set_default_dtype(before)
    assert kept.dtype == step_size.dtype == torch.float32
    assert kept == torch.tensor(0.9998, dtype=torch.float32)


def test_a_parameter_without_gradient_stays(fuses) -> None:
    optimizer = make()
    lacking = optimizer.param_groups[0]["params"][0]
    before = lacking.detach().clone()
    lacking.grad = None
    optimizer.step()
    assert torch.equal(lacking, before)


def test_cautious_decay_is_applied_apart(fuses) -> None:
    assert num_updates(make(cautious_wd=True)) == 0


def test_small_parameters_are_applied_apart(fuses, monkeypatch) -> None:
    monkeypatch.setattr(weight_targets, "MIN_ELEMENTS", 400)
    # Of 3x8x16 and 4x8x16 the average counts, as they are one chunk.
    assert num_updates(make()) == 2


def test_a_kernel_without_such_a_product_is_applied_apart(fuses, monkeypatch) -> None:
    monkeypatch.setattr(
        options, "choose_kernel_of", lambda *_: replace(fusing(), fuses_update=False)
    )
    assert num_updates(make()) == 0


def test_transposed_weights_are_applied_apart(fuses) -> None:
    weight = torch.nn.Parameter(torch.randn(2, 24, 8).mT)
    weight.grad = torch.randn(2, 8, 24)
    optimizer = Muon([weight], options=MuonOptions(ns_dtype="float32"))
    assert num_updates(optimizer) == 0


def test_steps_that_collect_statistics_are_applied_apart(fuses) -> None:
    optimizer = make(stats_interval=2)
    assert [num_updates(optimizer) for _ in range(3)] == [len(SHAPES), 0, len(SHAPES)]


def test_fused_chunks_move_less_and_hold_less(request) -> None:
    def price() -> Price:
        weight = torch.nn.Parameter(torch.zeros(64, 16, 32))
        chosen = MuonOptions(ns_dtype="float32", max_stack_gib=2**-15)
        optimizer = Muon([weight], options=chosen)
        assert len(optimizer.plan.slots) >= 4
        return optimizer.price()

    apart = price()
    request.getfixturevalue("fuses")
    fused = price()
    # The weight read and written and the update read, in fp32.
    assert apart.memory_bytes - fused.memory_bytes == 12 * 64 * 16 * 32
    assert fused.temporary_bytes < apart.temporary_bytes
    assert fused.flops == apart.flops


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("ns_dtype", ["bfloat16", "float16"])
def test_fused_updates_on_a_gpu_are_those_of_a_pass_apart(monkeypatch, ns_dtype, nesterov) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("fused on Hopper alone")
    pytest.importorskip("quack")
    shapes = [(16, 1536, 2048), (16, 2048, 768), (4096, 4608)]

    def train(min_elements: int) -> list[torch.Tensor]:
        monkeypatch.setattr(weight_targets, "MIN_ELEMENTS", min_elements)
        generator = torch.Generator("cuda").manual_seed(0)
        parameters = []
        for shape in shapes:
            draw = torch.randn(2, *shape, generator=generator, device="cuda")
            parameters.append(torch.nn.Parameter(draw[0]))
            parameters[-1].grad = draw[1].clone()
        chosen = MuonOptions(ns_dtype=ns_dtype)
        optimizer = Muon(parameters, lr=0.1, weight_decay=0.1, nesterov=nesterov, options=chosen)
        begun = [parameter.detach().clone() for parameter in parameters]
        reset_launch_counts()
        for finite in (True, True, False):
            if not finite:
                parameters[0].grad.fill_(float("nan"))
            before = [parameter.detach().clone() for parameter in parameters]
            optimizer.step(finite=torch.tensor(finite, device="cuda"))
        assert all(map(torch.equal, parameters, before))
        is_fused = min_elements < 10**9
        assert launch_counts().get("quack.weight_update", 0) == 9 * is_fused
        return [p.detach() - 0.99**2 * w for p, w in zip(parameters, begun, strict=True)]

    for fused, apart in zip(train(2**20), train(2**40), strict=True):
        error = torch.linalg.vector_norm(fused - apart) / torch.linalg.vector_norm(apart)
        assert error <= (2.5e-3 if ns_dtype == "bfloat16" else 4e-4)
