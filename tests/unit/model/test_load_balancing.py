import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from trainer.model.load_balancing import (
    RoutingRecord,
    load_balancing_loss,
    max_violation,
    summarize_routing,
)

P, S, E, K = 3, 10, 5, 2


def make_record(num_packs=P, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    logits_PSE = torch.randn(num_packs, S, E, generator=generator, dtype=dtype).requires_grad_()
    probs_PSE = logits_PSE.softmax(-1)
    return RoutingRecord(probs_PSE, probs_PSE.topk(K, -1).indices), logits_PSE


def test_each_pack_gives_the_loss_of_transformers():
    record, logits_PSE = make_record()
    expected = [load_balancing_loss_func((logits_PSE[pack],), E, K) for pack in range(P)]
    torch.testing.assert_close(load_balancing_loss(record), torch.stack(expected))


def test_masked_tokens_do_not_count():
    record, logits_PSE = make_record()
    mask_PS = torch.ones(P, S, dtype=torch.bool)
    mask_PS[0, 4:] = False
    expected = load_balancing_loss_func((logits_PSE[0, :4],), E, K)
    actual = load_balancing_loss(record, mask_PS)
    torch.testing.assert_close(actual[0], expected)
    torch.testing.assert_close(actual[1:], load_balancing_loss(record)[1:])
    _, counts_LE = summarize_routing([record], mask_PS)
    assert counts_LE.sum() == K * mask_PS.sum()


def test_a_pack_without_tokens_gives_zero_and_a_finite_gradient():
    record, logits_PSE = make_record()
    load_balancing_loss(record, torch.zeros(P, S, dtype=torch.bool)).sum().backward()
    assert torch.equal(logits_PSE.grad, torch.zeros(P, S, E))


def test_an_even_spread_gives_k():
    experts_S = torch.arange(10)
    record = RoutingRecord(
        torch.full((1, 10, E), 1 / E),
        torch.stack([experts_S % E, (experts_S + 1) % E], dim=-1).unsqueeze(0),
    )
    torch.testing.assert_close(load_balancing_loss(record), torch.tensor([float(K)]))


@pytest.mark.parametrize("split", [[1, 1, 1], [1, 2], [2, 1]])
def test_any_split_of_the_packs_gives_the_same_losses_and_counts(split):
    record, _ = make_record(dtype=torch.float64)
    whole_P, counts_LE = summarize_routing([record])
    parts = [
        summarize_routing([RoutingRecord(probs, experts)])
        for probs, experts in zip(
            record.probs_PSE.split(split), record.experts_PSK.split(split), strict=True
        )
    ]
    assert torch.equal(torch.cat([losses for losses, _ in parts]), whole_P)
    assert torch.equal(sum(counts for _, counts in parts), counts_LE)


def test_the_summary_is_the_mean_over_layers_with_counts_per_layer():
    records = [make_record(seed=seed)[0] for seed in range(4)]
    losses_P, counts_LE = summarize_routing(records)
    expected = sum(load_balancing_loss(record) for record in records) / 4
    torch.testing.assert_close(losses_P, expected)
    assert counts_LE.dtype == torch.int64
    for record, counts_E in zip(records, counts_LE, strict=True):
        assert torch.equal(counts_E, record.experts_PSK.flatten().bincount(minlength=E))


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        pytest.param([[4, 4, 4, 4]], [0.0], id="even"),
        pytest.param([[16, 0, 0, 0]], [3.0], id="all on one"),
        pytest.param([[6, 2, 4, 4], [4, 4, 4, 4]], [0.5, 0.0], id="two layers"),
        pytest.param([[0, 0]], [0.0], id="no tokens"),
    ],
)
def test_max_violation(counts, expected):
    assert max_violation(torch.tensor(counts)).tolist() == expected


def test_max_violation_of_a_dense_model_is_empty():
    assert max_violation(torch.zeros(0, 0, dtype=torch.int64)).shape == (0,)
