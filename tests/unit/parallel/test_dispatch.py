import pytest
import torch
import torch.distributed as dist

from tests.support.threads import run_threads
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


RANKS, EXPERTS = 3, 6
ROUTINGS = {
    "random": lambda num, choices, generator: (
        torch.rand(num, EXPERTS, generator=generator).topk(choices).indices
    ),
    "all to the last experts": lambda num, choices, generator: torch.arange(
        EXPERTS - choices, EXPERTS
    ).expand(num, choices),
}


def loop_over_experts(x_TD, experts_TK, weights_TK):
    """What dispatch, experts that multiply by their number, and combination make together."""
    rows = [
        sum(weights_TK[t, k] * (experts_TK[t, k] + 1) * x_TD[t] for k in range(experts_TK.shape[1]))
        for t in range(len(x_TD))
    ]
    return torch.stack(rows) if rows else torch.zeros_like(x_TD)


def dispatch_on_a_rank(problems):
    """Return, per problem, output, gradients and rows on this rank's experts."""
    rank, results = dist.get_rank(), []
    for tokens in problems:
        x_TD, experts_TK, weights_TK = (tensor.clone() for tensor in tokens[rank])
        x_TD.requires_grad_()
        weights_TK.requires_grad_()
        plan = plan_dispatch(experts_TK, EXPERTS, dist.group.WORLD)
        rows_RD = dispatch_tokens(x_TD, plan)
        counts = plan.offsets_E.diff(prepend=plan.offsets_E.new_zeros(1)).long()
        here = torch.arange(rank * EXPERTS // RANKS, (rank + 1) * EXPERTS // RANKS)
        factors_R1 = (here + 1).repeat_interleave(counts).unsqueeze(1)
        output_TD = combine_tokens(rows_RD * factors_R1, weights_TK, plan)
        output_TD.backward(torch.arange(1.0, D + 1).double().expand_as(output_TD))
        results.append((output_TD.detach(), x_TD.grad, weights_TK.grad, rows_RD.detach()))
    return results


@pytest.mark.parametrize("choices", [1, 2, EXPERTS])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_any_number_of_tokens_on_any_rank_equals_a_loop_over_experts(routing, choices):
    generator = torch.Generator().manual_seed(choices)
    problems = []
    for counts in ((4, 0, 7), (0, 1, 0), (0, 0, 0), (5, 5, 5), (1, 12, 2)):
        experts = [ROUTINGS[routing](num, choices, generator) for num in counts]
        x = [torch.randint(-9, 10, (num, D), generator=generator).double() for num in counts]
        weights = [
            torch.randint(1, 9, (num, choices), generator=generator).double() for num in counts
        ]
        problems.append(list(zip(x, experts, weights, strict=True)))
    by_rank = run_threads(RANKS, dispatch_on_a_rank, problems)
    for number, problem in enumerate(problems):
        for tokens, results in zip(problem, by_rank, strict=True):
            x_TD, _, weights_TK = tokens
            x_TD.requires_grad_()
            weights_TK.requires_grad_()
            expected_TD = loop_over_experts(*tokens)
            # Integers: sums are exact in any order.
            assert torch.equal(results[number][0], expected_TD)
            if len(x_TD):
                expected_TD.backward(torch.arange(1.0, D + 1).double().expand_as(expected_TD))
                assert torch.equal(results[number][1], x_TD.grad)
                assert torch.equal(results[number][2], weights_TK.grad)
        # By expert, then source rank, then token, as one process with all tokens has them.
        rows = torch.cat([results[number][3] for results in by_rank])
        expected = [
            x_TD[token].detach()
            for expert in range(EXPERTS)
            for x_TD, experts_TK, _ in problem
            for token in range(len(x_TD))
            if expert in experts_TK[token]
        ]
        assert torch.equal(rows, torch.stack(expected) if expected else rows[:0])
