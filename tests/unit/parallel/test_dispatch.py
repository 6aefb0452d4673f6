import pytest
import torch

from trainer.parallel.dispatch import combine_tokens, dispatch_tokens, plan_dispatch

T, K, D, E = 7, 2, 4, 5


def make_problem():
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randint(-3, 4, (T, D), generator=generator).double().requires_grad_()
    experts_TK = torch.rand(T, E, generator=generator).topk(K).indices
    weights_TK = torch.randint(1, 4, (T, K), generator=generator).double().requires_grad_()
    return x_TD, experts_TK, weights_TK


def test_rows_are_ordered_by_expert_then_token():
    x_TD, experts_TK, _ = make_problem()
    plan = plan_dispatch(experts_TK, E, None)
    rows_RD = dispatch_tokens(x_TD, plan)
    expected = [x_TD[t] for e in range(E) for t in range(T) if e in experts_TK[t]]
    assert torch.equal(rows_RD, torch.stack(expected))
    counts_E = experts_TK.flatten().bincount(minlength=E)
    assert plan.offsets_E.dtype == torch.int32
    assert plan.offsets_E.tolist() == counts_E.cumsum(0).tolist()


def test_combining_weighs_and_adds_the_results_of_each_token():
    x_TD, experts_TK, weights_TK = make_problem()
    plan = plan_dispatch(experts_TK, E, None)
    rows_RD = dispatch_tokens(x_TD, plan)
    ends = [0, *plan.offsets_E.tolist()]
    factors_R = torch.cat([torch.full((ends[e + 1] - ends[e], 1), e + 1.0) for e in range(E)])
    output_TD = combine_tokens(rows_RD * factors_R, weights_TK, plan)
    factors_T1 = (weights_TK * (experts_TK + 1)).sum(1, keepdim=True)
    assert torch.equal(output_TD, x_TD * factors_T1)


def test_gradients_pass_gradcheck():
    x_TD, experts_TK, weights_TK = make_problem()
    plan = plan_dispatch(experts_TK, E, None)

    def round_trip(x_TD, weights_TK):
        return combine_tokens(dispatch_tokens(x_TD, plan).sin(), weights_TK, plan)

    assert torch.autograd.gradcheck(round_trip, (x_TD, weights_TK))


@pytest.mark.parametrize("num_choices", [1, 3])
def test_no_tokens(num_choices):
    x_TD = torch.empty(0, D, requires_grad=True)
    plan = plan_dispatch(torch.empty(0, num_choices, dtype=torch.long), E, None)
    rows_RD = dispatch_tokens(x_TD, plan)
    output_TD = combine_tokens(rows_RD, torch.empty(0, num_choices), plan)
    output_TD.sum().backward()
    assert output_TD.shape == x_TD.grad.shape == (0, D)
    assert plan.offsets_E.tolist() == [0] * E


def test_one_rank_never_waits_for_the_device(monkeypatch):
    _, experts_TK, _ = make_problem()
    monkeypatch.setattr("trainer.parallel.dispatch._to_host", lambda sizes: pytest.fail("waited"))
    plan_dispatch(experts_TK, E, None)
