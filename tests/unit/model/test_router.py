import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from trainer.model.router import Router

T, D, E, K = 17, 8, 6, 3


def make_router(norm_topk_prob=True):
    router = Router(
        hidden_size=D, num_experts=E, num_experts_per_tok=K, norm_topk_prob=norm_topk_prob
    )
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    return router


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_routing_is_bitwise_that_of_transformers(dtype, norm_topk_prob):
    router = make_router(norm_topk_prob).to(dtype)
    reference = Qwen3MoeTopKRouter(
        Qwen3MoeConfig(
            hidden_size=D, num_experts=E, num_experts_per_tok=K, norm_topk_prob=norm_topk_prob
        )
    ).to(dtype)
    reference.load_state_dict(router.state_dict())
    x_TD = torch.randn(T, D, dtype=dtype)

    routing = router(x_TD)

    logits_TE, weights_TK, experts_TK = reference(x_TD)
    assert torch.equal(routing.probs_TE, logits_TE.float().softmax(-1))
    assert torch.equal(routing.experts_TK, experts_TK)
    assert torch.equal(routing.weights_TK, weights_TK)
    assert routing.weights_TK.dtype == dtype


def test_gradients_equal_those_of_transformers():
    router = make_router()
    reference = Qwen3MoeTopKRouter(
        Qwen3MoeConfig(hidden_size=D, num_experts=E, num_experts_per_tok=K, norm_topk_prob=True)
    )
    reference.load_state_dict(router.state_dict())
    x_TD, upstream_TK = torch.randn(T, D), torch.randn(T, K)
    (router(x_TD).weights_TK * upstream_TK).sum().backward()
    (reference(x_TD)[1] * upstream_TK).sum().backward()
    # The same sums in another order, of terms of size 1.
    torch.testing.assert_close(router.weight.grad, reference.weight.grad, rtol=1e-5, atol=1e-6)


def test_exact_ties_choose_distinct_experts_and_equal_weights():
    router = make_router()
    torch.nn.init.zeros_(router.weight)
    routing = router(torch.randn(T, D))
    assert all(len(set(experts)) == K for experts in routing.experts_TK.tolist())
    torch.testing.assert_close(routing.weights_TK, torch.full((T, K), 1 / K))


def test_no_tokens():
    routing = make_router()(torch.randn(0, D))
    assert routing.weights_TK.shape == routing.experts_TK.shape == (0, K)


def test_recomputation_replays_the_choice_when_a_tie_falls_the_other_way():
    router = make_router()
    x_TD = torch.randn(T, D)
    chosen = []

    signs = iter([1, -1])  # recomputed hidden states that differ, far more than rounding would

    def route(x_TD):
        routing = router(x_TD * next(signs))
        chosen.append(routing.experts_TK)
        return routing.weights_TK.square()

    contexts = {"use_reentrant": False, "context_fn": router.checkpoint_contexts}
    weights_TK = checkpoint(route, x_TD, **contexts)
    weights_TK.sum().backward()

    assert len(chosen) == 2
    assert torch.equal(chosen[0], chosen[1])
    assert not torch.equal(router(-x_TD).experts_TK, chosen[0])


def test_each_checkpoint_replays_its_own_forward():
    router = make_router()
    inputs = [torch.randn(T, D) for _ in range(2)]
    chosen = []

    def route(x_TD):
        routing = router(x_TD)
        chosen.append(routing.experts_TK)
        return routing.weights_TK.square()

    contexts = {"use_reentrant": False, "context_fn": router.checkpoint_contexts}
    outputs = [checkpoint(route, x_TD, **contexts) for x_TD in inputs]
    for output in outputs:  # first in, first out, though one router serves both
        output.sum().backward()
    assert [torch.equal(chosen[i], chosen[i + 2]) for i in range(2)] == [True, True]
    assert not torch.equal(chosen[0], chosen[1])
