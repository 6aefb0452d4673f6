import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.support.host_reads import HostReads
from trainer.model.log_probs import token_log_probs

T, D, V = 13, 8, 11


def make_inputs(dtype, targets=None):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, D, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=dtype).requires_grad_()
    if targets is None:
        targets = torch.randint(0, V, (T,), generator=generator)
        targets[[0, 5, 6, T - 1]] = -100
    return hidden, weight, targets


def plain_log_probs(hidden, weight, targets, temperature):
    """All logits at once, by torch's own functions."""
    logits = hidden @ weight.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    log_probs = logits.log_softmax(-1)
    chosen = log_probs.gather(1, targets.clamp_min(0).unsqueeze(1)).squeeze(1)
    trained = targets != -100
    entropy = -(log_probs.exp() * log_probs).sum(1)
    return chosen * trained, (entropy * trained).detach()


# fp64: rounding only. fp32: a few ulp of values of size 10. bf16: both round logits alike,
# and their gradients once more (2^-8 of sums of size 10).
@pytest.mark.parametrize(
    ("dtype", "value_tolerance", "grad_tolerance"),
    [
        pytest.param(torch.float64, 1e-13, 1e-13, id="fp64"),
        pytest.param(torch.float32, 5e-6, 1e-5, id="fp32"),
        pytest.param(torch.bfloat16, 1e-5, 0.05, id="bf16"),
    ],
)
@pytest.mark.parametrize("chunk_tokens", [1, 4, 9, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_the_plain_computation(
    dtype, value_tolerance, grad_tolerance, chunk_tokens, temperature
):
    upstream = torch.randn(T, generator=torch.Generator().manual_seed(1))
    hidden, weight, targets = make_inputs(dtype)
    expected, expected_entropy = plain_log_probs(hidden, weight, targets, temperature)
    expected.backward(upstream.to(expected.dtype))
    expected_grads = hidden.grad, weight.grad
    hidden, weight, targets = make_inputs(dtype)

    actual, entropy = token_log_probs(
        hidden,
        weight,
        targets,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        with_entropy=True,
    )
    actual.backward(upstream.to(actual.dtype))

    close = {"rtol": 0, "atol": value_tolerance}
    torch.testing.assert_close(actual, expected, **close)
    torch.testing.assert_close(entropy, expected_entropy, **close)
    assert not entropy.requires_grad
    for grad, expected_grad in zip((hidden.grad, weight.grad), expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=0, atol=grad_tolerance)


def test_gradients_pass_gradcheck():
    hidden, weight, targets = make_inputs(torch.float64)

    def log_probs(hidden, weight):
        return token_log_probs(hidden, weight, targets, temperature=1.3, chunk_tokens=4)[0]

    assert torch.autograd.gradcheck(log_probs, (hidden, weight))


def test_ignored_targets_give_exact_zeros_and_no_gradient():
    hidden, weight, targets = make_inputs(torch.float32)
    log_probs, _ = token_log_probs(hidden, weight, targets, chunk_tokens=4)
    log_probs.sum().backward()
    ignored = targets == -100
    assert (log_probs[ignored] == 0).all()
    assert (hidden.grad[ignored] == 0).all()
    assert (hidden.grad[~ignored] != 0).all()


@pytest.mark.parametrize("with_entropy", [False, True])
def test_all_masked_gives_zero_gradients_that_are_not_none(with_entropy):
    hidden, weight, targets = make_inputs(torch.float32, torch.full((T,), -100))
    log_probs, entropy = token_log_probs(hidden, weight, targets, with_entropy=with_entropy)
    log_probs.sum().backward()
    assert torch.equal(log_probs, torch.zeros(T))
    assert entropy is None or torch.equal(entropy, torch.zeros(T))
    assert torch.equal(hidden.grad, torch.zeros(T, D))
    assert torch.equal(weight.grad, torch.zeros(V, D))


def test_no_tokens_at_all():
    weight = torch.randn(V, D, requires_grad=True)
    hidden = torch.randn(0, D, requires_grad=True)
    token_log_probs(hidden, weight, torch.empty(0, dtype=torch.long))[0].sum().backward()
    assert torch.equal(weight.grad, torch.zeros(V, D))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_gets_no_gradient_and_the_other_the_same(frozen):
    hidden, weight, targets = make_inputs(torch.float64)
    token_log_probs(hidden, weight, targets)[0].sum().backward()
    expected = {"hidden": weight.grad, "weight": hidden.grad}[frozen]
    hidden, weight, targets = make_inputs(torch.float64)
    inputs = {"hidden": hidden, "weight": weight}
    inputs[frozen].requires_grad_(False)
    token_log_probs(hidden, weight, targets)[0].sum().backward()
    (trained,) = (tensor for name, tensor in inputs.items() if name != frozen)
    assert torch.equal(trained.grad, expected)
    assert inputs[frozen].grad is None


def test_extreme_logits_stay_finite():
    hidden = torch.full((1, D), 1e4, requires_grad=True)
    weight = torch.cat([torch.ones(1, D), -torch.ones(1, D)]).requires_grad_()
    log_probs, entropy = token_log_probs(hidden, weight, torch.tensor([1]), with_entropy=True)
    log_probs.sum().backward()
    assert log_probs.item() == -2e4 * D
    assert entropy.item() == 0
    assert hidden.grad.isfinite().all()


class LargestTensor(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_logits_exist_for_one_chunk_only_in_both_passes():
    tokens, vocabulary, chunk_tokens = 64, 100, 4
    hidden = torch.randn(tokens, 2, requires_grad=True)
    weight = torch.randn(vocabulary, 2, requires_grad=True)
    with LargestTensor() as largest:
        log_probs, _ = token_log_probs(
            hidden,
            weight,
            torch.zeros(tokens, dtype=torch.long),
            chunk_tokens=chunk_tokens,
            with_entropy=True,
        )
        log_probs.sum().backward()
    assert largest.numel == chunk_tokens * vocabulary


def test_only_trained_rows_are_computed():
    hidden, weight, targets = make_inputs(torch.float32)
    num_trained = int((targets != -100).sum())
    with FlopCounterMode(display=False) as flops:
        token_log_probs(hidden, weight, targets)[0].sum().backward()
    # Logits twice, and a gradient for each of the two inputs; 2 FLOPs per multiply-add.
    assert flops.get_total_flops() == 4 * 2 * num_trained * V * D


def test_rows_that_are_given_are_not_looked_for():
    hidden, weight, targets = make_inputs(torch.float32)
    rows = (targets != -100).nonzero().squeeze(1)
    with HostReads() as reads:
        given, _ = token_log_probs(hidden, weight, targets, target_rows_N=rows)
        given.sum().backward()
    assert reads.names == []
    found, _ = token_log_probs(hidden, weight, targets)
    assert torch.equal(given, found)


# On a GPU torch.compile fuses what follows the product: the same formula, rounded at other places.
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # importing the compiler
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [pytest.param(torch.float32, 2e-5, id="fp32"), pytest.param(torch.bfloat16, 0.02, id="bf16")],
)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_one_kernel_a_chunk_computes_the_same_on_a_gpu(dtype, tolerance, temperature):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 64, generator=generator).to(dtype)
    weight = torch.randn(1000, 64, generator=generator).to(dtype)
    targets = torch.randint(0, 1000, (300,), generator=generator)
    targets[::7] = -100
    upstream = torch.randn(300, generator=generator)
    found = []
    for device in ("cpu", "cuda"):
        h, w = (x.detach().to(device).requires_grad_() for x in (hidden, weight))
        log_probs, entropy = token_log_probs(
            h, w, targets.to(device), temperature=temperature, chunk_tokens=100, with_entropy=True
        )
        log_probs.backward(upstream.to(device))
        found.append([x.detach().cpu().double() for x in (log_probs, entropy, h.grad, w.grad)])
    for expected, actual in zip(*found, strict=True):
        assert torch.linalg.vector_norm(actual - expected) <= tolerance * expected.norm()
