import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from trainer.model.load_balancing import summarize_routing
from trainer.model.moe import MoEBlock, record_routing

P, S, D, F, E, K = 2, 9, 16, 8, 8, 2


def make_block(impl="grouped_mm", dtype=torch.float32, norm_topk_prob=True):
    torch.manual_seed(0)
    block = MoEBlock(
        hidden_size=D,
        moe_intermediate_size=F,
        num_experts=E,
        num_experts_per_tok=K,
        norm_topk_prob=norm_topk_prob,
        impl=impl,
    ).to(dtype)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return block


def make_reference(block, norm_topk_prob=True):
    config = Qwen3MoeConfig(
        hidden_size=D,
        moe_intermediate_size=F,
        num_experts=E,
        num_experts_per_tok=K,
        norm_topk_prob=norm_topk_prob,
    )
    config._experts_implementation = "eager"
    reference = Qwen3MoeSparseMoeBlock(config).to(block.gate.weight.dtype)
    reference.load_state_dict(block.state_dict())
    return reference


def run(block, x_PSD):
    x_PSD = x_PSD.clone().requires_grad_()
    output = block(x_PSD)
    (output * torch.arange(output.numel()).view_as(output) / output.numel()).sum().backward()
    return [output.detach(), x_PSD.grad, *(p.grad for p in block.parameters())]


# fp32: the same sums in another order. bf16: each of K products rounded in another order, 2^-8
# of values of size 1, with gradients of size 10 in the sums.
@pytest.mark.parametrize(
    ("impl", "dtype", "tolerance"),
    [
        ("grouped_mm", torch.float32, 1e-5),
        ("loop", torch.float32, 1e-5),
        ("grouped_mm", torch.bfloat16, 0.06),
    ],
)
@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_outputs_and_gradients_equal_those_of_transformers(impl, dtype, tolerance, norm_topk_prob):
    block = make_block(impl, dtype, norm_topk_prob)
    reference = make_reference(block, norm_topk_prob)
    x_PSD = torch.randn(P, S, D, dtype=dtype)
    for actual, expected in zip(run(block, x_PSD), run(reference, x_PSD), strict=True):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_state_dict_has_the_names_and_order_of_transformers():
    block = make_block()
    reference = make_reference(block)
    assert list(block.state_dict()) == list(reference.state_dict())
    assert [name for name, _ in block.named_parameters()] == [
        name for name, _ in reference.named_parameters()
    ]


def test_gradients_pass_gradcheck():
    block = make_block("loop", torch.float64)
    x_PSD = torch.randn(1, 5, D, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in block.named_parameters()]

    def apply(x_PSD, *parameters):
        named = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(block, named, (x_PSD,))

    assert torch.autograd.gradcheck(apply, (x_PSD, *block.parameters()))


@pytest.mark.parametrize("impl", ["grouped_mm", "loop"])
def test_idle_experts_and_no_tokens_give_zero_gradients_not_none(impl):
    block = make_block(impl)
    block(torch.randn(1, 1, D)).sum().backward()  # K of E experts get the only token
    idle_E = block.experts.down_proj.grad.abs().sum((1, 2)) == 0
    assert idle_E.sum() == E - K
    block.zero_grad()
    block(torch.randn(1, 0, D)).sum().backward()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in block.parameters())


def test_two_runs_are_bitwise_equal():
    block, x_PSD = make_block(), torch.randn(P, S, D)
    first = run(block, x_PSD)
    first = [tensor.clone() for tensor in first]
    block.zero_grad()
    second = run(block, x_PSD)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_routing_is_recorded_only_inside_the_context():
    blocks = [make_block(), make_block()]
    x_PSD = torch.randn(P, S, D)
    blocks[0](x_PSD)
    with record_routing(blocks) as records:
        for block in blocks:
            x_PSD = block(x_PSD)
    blocks[0](x_PSD)
    assert [record.probs_PSE.shape for record in records] == [(P, S, E)] * 2
    _, counts_LE = summarize_routing(records)
    assert counts_LE.sum(1).tolist() == [P * S * K] * 2


def test_recording_stops_after_an_error():
    block = make_block()
    with pytest.raises(RuntimeError), record_routing([block]) as records:
        block(torch.randn(P, S, D + 1))
    block(torch.randn(P, S, D))
    assert records == []


def test_checkpointing_changes_no_number_and_records_once():
    block, x_PSD = make_block(), torch.randn(P, S, D)
    results = []
    for is_checkpointed in (False, True):
        block.zero_grad()
        x = x_PSD.clone().requires_grad_()
        with record_routing([block]) as records:
            output = (
                checkpoint(block, x, use_reentrant=False, context_fn=block.gate.checkpoint_contexts)
                if is_checkpointed
                else block(x)
            )
        load_balancing_P, _ = summarize_routing(records)
        (output.square().sum() + load_balancing_P.sum()).backward()
        assert len(records) == 1
        gradients = [p.grad.clone() for p in block.parameters()]
        results.append([output.detach(), load_balancing_P.detach(), x.grad, *gradients])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_tied_experts_survive_checkpointing_with_noise_in_the_recomputation():
    """Expert weights and router rows all equal: every choice is an exact tie."""
    block = make_block()
    with torch.no_grad():
        block.gate.weight.copy_(block.gate.weight[:1].expand(E, D).clone())
    noise = iter([0.0, 1e-3])
    x_PSD = torch.randn(P, S, D, requires_grad=True)

    def layer(x):
        scale = next(noise)
        return block(x + scale * torch.randn(P, S, D))

    output = checkpoint(
        layer, x_PSD, use_reentrant=False, context_fn=block.gate.checkpoint_contexts
    )
    output.sum().backward()  # counts per expert are saved tensors: a flip would show as an error
    assert x_PSD.grad.isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("impl", ["grouped_mm", "loop"])
def test_a_non_finite_token_neither_crashes_nor_spreads(impl, bad):
    block, x_PSD = make_block(impl), torch.randn(P, S, D)
    x_PSD[0, 3] = bad
    output_PSD = block(x_PSD)
    is_bad_PS = ~output_PSD.isfinite().all(-1)
    assert is_bad_PS.nonzero().tolist() == [[0, 3]]


def test_the_block_runs_inside_a_compiled_layer():
    block, x_PSD = make_block(), torch.randn(P, S, D)
    layer = torch.nn.Sequential(torch.nn.Linear(D, D), block)
    expected = layer(x_PSD)
    compiled = torch.compile(layer, backend="aot_eager")
    with record_routing([block]) as records:
        actual = compiled(x_PSD)
    torch.testing.assert_close(actual, expected)
    assert len(records) == 1


def test_the_block_is_built_on_the_meta_device():
    with torch.device("meta"):
        block = make_block()
    assert all(p.is_meta for p in block.parameters())
