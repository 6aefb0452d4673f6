import pytest
import torch

from trainer.errors import UserError
from trainer.model.experts import (
    Experts,
    choose_experts_impl,
    grouped_linear,
    loop_linear,
    swiglu,
    zero_idle_,
)

M, N = 24, 16

COUNTS = {
    "uneven": [1, 7, 8, 9],
    "idle first": [0, 3, 5],
    "idle last": [4, 2, 0],
    "idle middle": [3, 0, 0, 5],
    "one expert": [6],
    "no rows": [0, 0, 0],
}


DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


def make_problem(counts, dtype, device="cpu"):
    generator = torch.Generator().manual_seed(0)

    def integers(*shape):  # sums of products stay exact, also in bf16
        return torch.randint(-2, 3, shape, generator=generator).to(device, dtype)

    rows = integers(sum(counts), N).requires_grad_()
    weight = integers(len(counts), M, N).requires_grad_()
    offsets = torch.tensor(counts).cumsum(0).to(device, torch.int32)
    return rows, weight, offsets, integers(sum(counts), M)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("device", DEVICES)
def test_grouped_equals_loop_on_integers(counts, dtype, device):
    results = []
    for linear in (grouped_linear, loop_linear):
        rows, weight, offsets, upstream = make_problem(counts, dtype, device)
        output = linear(rows, weight, offsets)
        output.backward(upstream)
        results.append((output, rows.grad, weight.grad))
    for grouped, loop in zip(*results, strict=True):
        assert torch.equal(grouped, loop)


@pytest.mark.parametrize("linear", [grouped_linear, loop_linear])
@pytest.mark.parametrize("counts", [COUNTS["idle middle"], COUNTS["no rows"]])
def test_idle_experts_get_zero_gradients_not_none(linear, counts):
    rows, weight, offsets, upstream = make_problem(counts, torch.float32)
    linear(rows, weight, offsets).backward(upstream)
    for expert, count in enumerate(counts):
        assert (weight.grad[expert] != 0).any() == (count > 0)


def test_idle_experts_get_zeros_even_if_the_kernel_leaves_garbage(monkeypatch):
    """CPU kernels write zeros; others may not write at all."""
    grouped_mm = torch.nn.functional.grouped_mm

    def with_garbage(a, b, *, offs):
        result = grouped_mm(a, b, offs=offs)
        if result.dim() == 3:
            result[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        return result

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", with_garbage)
    rows, weight, offsets, upstream = make_problem(COUNTS["idle middle"], torch.float32)
    grouped_linear(rows, weight, offsets).backward(upstream)
    assert weight.grad.isfinite().all()


def test_an_expanded_upstream_gradient_is_taken():
    rows, weight, offsets, _ = make_problem(COUNTS["uneven"], torch.float32)
    grouped_linear(rows, weight, offsets).sum().backward()  # strides of 0
    assert rows.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_swiglu_is_bitwise_its_two_operations(dtype, device):
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(7, 2 * N, generator=generator).to(device, dtype).requires_grad_()
    upstream = torch.randn(7, N, generator=generator).to(device, dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    (expected_grad,) = torch.autograd.grad(expected, gate_up, upstream)
    actual = swiglu(gate_up)
    (actual_grad,) = torch.autograd.grad(actual, gate_up, upstream)
    assert torch.equal(actual, expected)
    assert torch.equal(actual_grad, expected_grad)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_experts_on_one_gpu_never_wait_for_the_device():
    experts = Experts(hidden_size=N, moe_intermediate_size=8, num_experts=4, impl="grouped_mm")
    experts = experts.to("cuda", torch.bfloat16)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    x_TD = torch.randn(9, N, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    experts_TK = torch.rand(9, 4, device="cuda").topk(2).indices
    weights_TK = torch.rand(9, 2, device="cuda", dtype=torch.bfloat16)
    experts(x_TD, experts_TK, weights_TK).sum().backward()  # warm up
    torch.cuda.set_sync_debug_mode("error")
    try:
        experts(x_TD, experts_TK, weights_TK).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def choose(requested, dtype=torch.float32, hidden_size=64, moe_intermediate_size=32):
    return choose_experts_impl(
        requested,
        dtype=dtype,
        hidden_size=hidden_size,
        moe_intermediate_size=moe_intermediate_size,
        device_type="cpu",
    )


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        pytest.param({}, "grouped_mm", id="fp32"),
        pytest.param({"dtype": torch.bfloat16}, "grouped_mm", id="bf16"),
        pytest.param({"dtype": torch.float64}, "loop", id="fp64"),
        pytest.param({"hidden_size": 66}, "loop", id="hidden misaligned"),
        pytest.param({"moe_intermediate_size": 30}, "loop", id="intermediate misaligned"),
        pytest.param({"dtype": torch.bfloat16, "hidden_size": 68}, "loop", id="bf16 misaligned"),
    ],
)
def test_auto_takes_grouped_mm_where_it_runs_and_says_why(arguments, name):
    impl = choose("auto", **arguments)
    assert impl.name == name
    assert impl.reason


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": torch.float64}, r"model\.experts='grouped_mm'.*not float64.*'loop'"),
        ({"hidden_size": 66}, r"model\.experts='grouped_mm'.*hidden_size=66.*multiple of 4"),
        (
            {"dtype": torch.bfloat16, "moe_intermediate_size": 12},
            r"moe_intermediate_size=12.*multiple of 8",
        ),
    ],
)
def test_grouped_mm_asked_for_and_not_possible_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        choose("grouped_mm", **arguments)


def test_loop_asked_for_is_loop():
    assert choose("loop").name == "loop"


@pytest.mark.parametrize(("impl", "num_calls"), [("grouped_mm", 2), ("loop", 0)])
def test_the_impl_asked_for_runs(monkeypatch, impl, num_calls):
    calls = []
    grouped_mm = torch.nn.functional.grouped_mm

    def counted(*args, **kwargs):
        calls.append(1)
        return grouped_mm(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", counted)
    experts = Experts(hidden_size=N, moe_intermediate_size=8, num_experts=4, impl=impl)
    experts(torch.randn(5, N), torch.zeros(5, 1, dtype=torch.long), torch.ones(5, 1))
    assert len(calls) == num_calls


def test_experts_are_built_on_the_meta_device_with_the_names_of_transformers():
    with torch.device("meta"):
        experts = Experts(hidden_size=16, moe_intermediate_size=8, num_experts=4, impl="loop")
    shapes = {name: tuple(p.shape) for name, p in experts.named_parameters()}
    assert shapes == {"gate_up_proj": (4, 16, 16), "down_proj": (4, 16, 8)}
    assert all(p.is_meta for p in experts.parameters())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("shape", [(3, 5), (128, 96)], ids=["small", "many tiles"])
def test_zeros_go_to_idle_experts_alone(counts, shape, device):
    poisoned = torch.full((len(counts), *shape), torch.nan, device=device)
    offsets = torch.tensor(counts, device=device).cumsum(0).to(torch.int32)
    zero_idle_(poisoned, offsets)
    for expert, count in zip(poisoned, counts, strict=True):
        assert torch.equal(expert.nan_to_num(7.0), torch.full_like(expert, 7.0 if count else 0.0))
