import math

import pytest
import torch

from trainer.losses import perplexity, sft_loss
from trainer.model.outputs import TokenOutputs

P, S = 4, 6


def make_micro_batch():
    generator = torch.Generator().manual_seed(0)
    log_probs_PS = -torch.rand(P, S, generator=generator, dtype=torch.float64)
    weights_PS = torch.rand(P, S, generator=generator, dtype=torch.float64)
    weights_PS *= torch.rand(P, S, generator=generator) > 0.4
    load_balancing_P = 1 + torch.rand(P, generator=generator, dtype=torch.float64)
    return log_probs_PS * (weights_PS > 0), weights_PS, load_balancing_P


def outputs_of(log_probs_PS, load_balancing_P):
    return TokenOutputs(
        log_probs_PS=log_probs_PS,
        entropy_PS=None,
        load_balancing_P=load_balancing_P,
        expert_counts_LE=torch.zeros(0, 0, dtype=torch.int64),
    )


def test_the_loss_is_the_formula():
    log_probs_PS, weights_PS, load_balancing_P = make_micro_batch()
    terms = sft_loss(
        outputs_of(log_probs_PS, load_balancing_P),
        weights_PS,
        total_weight=weights_PS.sum(),
        load_balancing_coef=0.3,
    )
    weights, total_weight = weights_PS.tolist(), weights_PS.sum().item()
    cross_entropy = load_balancing = 0.0
    for pack in range(P):
        for position in range(S):
            weight = weights[pack][position] / total_weight
            cross_entropy -= weight * log_probs_PS[pack, position].item()
            load_balancing += weight * load_balancing_P[pack].item()
    assert terms.cross_entropy.item() == pytest.approx(cross_entropy, rel=1e-12)
    assert terms.load_balancing.item() == pytest.approx(load_balancing, rel=1e-12)
    assert terms.total.item() == pytest.approx(cross_entropy + 0.3 * load_balancing, rel=1e-12)


@pytest.mark.parametrize("split", [[1, 1, 1, 1], [2, 2], [3, 1], [4]])
def test_shares_of_any_split_add_up(split):
    micro_batch = make_micro_batch()
    total_weight = micro_batch[1].sum()

    def share(log_probs_PS, weights_PS, load_balancing_P):
        outputs = outputs_of(log_probs_PS, load_balancing_P)
        terms = sft_loss(outputs, weights_PS, total_weight=total_weight, load_balancing_coef=0.1)
        return terms.total

    parts = zip(*(tensor.split(split) for tensor in micro_batch), strict=True)
    torch.testing.assert_close(
        sum(share(*part) for part in parts), share(*micro_batch), rtol=1e-13, atol=0
    )


@pytest.mark.parametrize("total_weight", [0.0, 7.0], ids=["nothing anywhere", "others train"])
def test_an_all_masked_micro_batch_contributes_zero(total_weight):
    log_probs_PS = torch.zeros(P, S, requires_grad=True)
    load_balancing_P = torch.ones(P, requires_grad=True)
    terms = sft_loss(
        outputs_of(log_probs_PS, load_balancing_P),
        torch.zeros(P, S),
        total_weight=torch.tensor(total_weight),
        load_balancing_coef=0.5,
    )
    terms.total.backward()
    assert terms.total.item() == 0
    assert torch.equal(log_probs_PS.grad, torch.zeros(P, S))
    assert torch.equal(load_balancing_P.grad, torch.zeros(P))


def test_a_coefficient_of_zero_leaves_load_balancing_out_of_the_graph():
    load_balancing_P = torch.ones(P, requires_grad=True)
    terms = sft_loss(
        outputs_of(torch.zeros(P, S, requires_grad=True), load_balancing_P),
        torch.ones(P, S),
        total_weight=torch.tensor(24.0),
    )
    terms.total.backward()
    assert load_balancing_P.grad is None
    assert terms.load_balancing.item() == 1
    assert not terms.load_balancing.requires_grad


@pytest.mark.parametrize(
    ("mean_loss", "expected"), [(0.0, 1.0), (math.log(7), 7.0), (1e4, math.inf)]
)
def test_perplexity(mean_loss, expected):
    assert perplexity(mean_loss) == pytest.approx(expected)
    assert math.isnan(perplexity(math.nan))
