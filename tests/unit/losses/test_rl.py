"""Policy losses against computations by hand and the formulas of TRL and prime-rl."""

import math

import pytest
import torch

from trainer.config.rl import CISPOLossConfig, ClipLossConfig, GSPOLossConfig
from trainer.losses.rl import SUMS, PolicyTokens, entropy_surrogate, k3, policy_loss

LENGTHS = (3, 5, 1)
"""Trained tokens of three completions, laid out in two packs of 8 positions."""
COMPLETIONS = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 2, 0, 0]])
MASK = torch.tensor([[0, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0, 0]]).float()
ADVANTAGES = torch.tensor([[1.5] * 8, [-0.5] * 5 + [0.75] * 3])


def make_tokens(seed=0, spread=0.5, **changes):
    generator = torch.Generator().manual_seed(seed)

    def draw():
        return -torch.rand(2, 8, generator=generator) * spread * 2 * MASK

    log_probs = draw().requires_grad_()
    fields = {
        "log_probs": log_probs,
        "entropy": torch.rand(2, 8, generator=generator) * MASK,
        "sampler_log_probs": draw(),
        "old_log_probs": draw(),
        "anchor_log_probs": draw(),
        "reference_log_probs": None,
        "advantages": ADVANTAGES,
        "weights": MASK,
        "completions": COMPLETIONS,
    }
    return PolicyTokens(**(fields | changes))


def run(tokens, config):
    terms = policy_loss(tokens, config, tokens.weights.sum())
    (gradient,) = torch.autograd.grad(terms.loss, tokens.log_probs)
    sums = dict(zip(SUMS, terms.sums.tolist(), strict=True))
    return terms.loss.item(), gradient, sums


def trained(tokens):
    """(row, position, log-prob, old log-prob, advantage) of each trained token, as floats."""
    for row, position in MASK.nonzero().tolist():
        yield (
            row,
            position,
            tokens.log_probs[row, position].item(),
            tokens.old_log_probs[row, position].item(),
            ADVANTAGES[row, position].item(),
        )


def close(actual, expected):
    # fp32 sums of nine numbers near 1.
    torch.testing.assert_close(
        torch.as_tensor(actual), torch.as_tensor(expected), rtol=0, atol=2e-6
    )


@pytest.mark.parametrize(
    ("clip_low", "clip_high"), [(0.2, 0.2), (0.1, 0.4)], ids=["symmetric", "asymmetric"]
)
def test_clip_equals_ppo_by_hand(clip_low, clip_high):
    tokens = make_tokens()
    expected, gradient, num_clipped = 0.0, torch.zeros(2, 8), 0
    for row, position, log_prob, old, advantage in trained(tokens):
        ratio = math.exp(log_prob - old)
        bounded = min(max(ratio, 1 - clip_low), 1 + clip_high)
        expected -= min(ratio * advantage, bounded * advantage) / 9
        if ratio * advantage <= bounded * advantage:
            gradient[row, position] = -ratio * advantage / 9
        else:
            num_clipped += 1
    loss, actual_gradient, sums = run(
        tokens, ClipLossConfig(clip_low=clip_low, clip_high=clip_high)
    )
    assert 0 < num_clipped < 9
    close(loss, expected)
    close(actual_gradient, gradient)
    assert sums["clipped"] == num_clipped
    assert sums["num_tokens"] == 9
    close(sums["nll"], -tokens.log_probs.sum().item())


def test_cispo_by_hand():
    tokens = make_tokens()
    expected, gradient = 0.0, torch.zeros(2, 8)
    for row, position, log_prob, old, advantage in trained(tokens):
        weight = min(math.exp(log_prob - old), 1.1)
        expected -= weight * advantage * log_prob / 9
        gradient[row, position] = -weight * advantage / 9
    loss, actual_gradient, _ = run(tokens, CISPOLossConfig(clip_high=0.1))
    close(loss, expected)
    close(actual_gradient, gradient)
    assert (actual_gradient[MASK > 0] != 0).all(), "clipped tokens keep a gradient"


def sequence_ratios(tokens):
    """Each completion's geometric mean ratio, as floats."""
    sums = [0.0, 0.0, 0.0]
    for row, position, log_prob, old, _ in trained(tokens):
        sums[COMPLETIONS[row, position]] += log_prob - old
    return [math.exp(total / length) for total, length in zip(sums, LENGTHS, strict=True)]


@pytest.mark.parametrize("clip", [0.02, 5.0], ids=["clipped", "free"])
def test_gspo_by_hand(clip):
    tokens = make_tokens()
    ratios = sequence_ratios(tokens)
    expected, gradient, num_clipped = 0.0, torch.zeros(2, 8), 0
    for row, position, _, _, advantage in trained(tokens):
        ratio = ratios[COMPLETIONS[row, position]]
        bounded = min(max(ratio, 1 - min(clip, 0.9)), 1 + clip)
        expected -= min(ratio * advantage, bounded * advantage) / 9
        if ratio * advantage <= bounded * advantage:
            gradient[row, position] = -ratio * advantage / 9
        else:
            num_clipped += 1
    config = GSPOLossConfig(clip_low=min(clip, 0.9), clip_high=clip)
    loss, actual_gradient, sums = run(tokens, config)
    close(loss, expected)
    close(actual_gradient, gradient)
    assert sums["clipped"] == num_clipped
    assert (num_clipped > 0) == (clip < 1)


def trl_loss(tokens, *, level="token", loss_type, beta=0.0, epsilon, cap=None):
    """TRL's GRPOTrainer loss, completions as rows.

    `level` is its importance_sampling_level, `cap` bounds the correction for the sampler's
    probabilities (vllm_importance_sampling_mode "token_truncate").
    """
    rows = [COMPLETIONS.eq(i) & MASK.bool() for i in range(3)]
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(n) for n in LENGTHS], batch_first=True)

    def as_rows(values):
        return torch.nn.utils.rnn.pad_sequence([values[row] for row in rows], batch_first=True)

    log_probs = as_rows(tokens.log_probs)
    log_ratio = log_probs - as_rows(tokens.old_log_probs)
    if level == "sequence":
        log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1)).unsqueeze(-1)
    advantages = torch.tensor([[1.5], [-0.5], [0.75]])
    coef_1 = torch.exp(log_ratio)
    if loss_type == "cispo":
        per_token = -coef_1.clamp(max=epsilon).detach() * advantages * log_probs
    else:
        coef_2 = torch.clamp(coef_1, 1 - epsilon, 1 + epsilon)
        per_token = -torch.min(coef_1 * advantages, coef_2 * advantages).expand_as(mask)
    if cap is not None:
        mismatch = as_rows(tokens.anchor_log_probs) - as_rows(tokens.sampler_log_probs)
        per_token = per_token * mismatch.exp().clamp(max=cap)
    if beta:
        difference = as_rows(tokens.reference_log_probs) - log_probs
        per_token = per_token + beta * (torch.exp(difference) - difference - 1)
    if loss_type == "grpo":
        return ((per_token * mask).sum(-1) / mask.sum(-1)).mean()
    return (per_token * mask).sum() / mask.sum()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_losses_equal_those_of_trl(level, loss_type, beta):
    weights = MASK
    if loss_type == "grpo":
        length = torch.tensor(LENGTHS)[COMPLETIONS]
        weights = MASK / length
    reference = -torch.rand(2, 8, generator=torch.Generator().manual_seed(9)) * MASK
    tokens = make_tokens(weights=weights, reference_log_probs=reference if beta else None)
    kind = ClipLossConfig if level == "token" else GSPOLossConfig
    config = kind(clip_low=0.15, clip_high=0.15, kl_coef=beta)
    expected = trl_loss(tokens, level=level, loss_type=loss_type, beta=beta, epsilon=0.15)
    (expected_gradient,) = torch.autograd.grad(expected, tokens.log_probs)
    loss, gradient, _ = run(tokens, config)
    close(loss, expected.item())
    close(gradient, expected_gradient)


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        # TRL's epsilon_high bounds the ratio itself; ours counts from 1.
        (CISPOLossConfig(clip_high=0.1), {"loss_type": "cispo", "epsilon": 1.1}),
        (
            ClipLossConfig(
                clip_low=0.15,
                clip_high=0.15,
                old_log_probs="trainer",
                importance="truncate",
                importance_high=1.1,
                kl_coef=0.3,
            ),
            {"loss_type": "dapo", "epsilon": 0.15, "cap": 1.1, "beta": 0.3},
        ),
    ],
    ids=["cispo", "truncated importance"],
)
def test_cispo_and_truncated_importance_equal_those_of_trl(config, settings):
    reference = -torch.rand(2, 8, generator=torch.Generator().manual_seed(9)) * MASK
    tokens = make_tokens(reference_log_probs=reference if config.kl_coef else None)
    expected = trl_loss(tokens, **settings)
    (expected_gradient,) = torch.autograd.grad(expected, tokens.log_probs)
    loss, gradient, _ = run(tokens, config)
    close(loss, expected.item())
    close(gradient, expected_gradient)


def test_with_open_bounds_the_loss_is_prime_rl_s_without_its_masks():
    # prime-rl: −A·r summed over tokens, over the token count, r to the sampler; its DPPO mask (by
    # probability difference) and its squared log-ratio are what ours does not have.
    tokens = make_tokens()
    tokens = make_tokens(old_log_probs=tokens.sampler_log_probs)
    ratio = torch.exp(tokens.log_probs - tokens.sampler_log_probs)
    expected = -(MASK * ADVANTAGES * ratio).sum() / 9
    loss, _, _ = run(tokens, ClipLossConfig(clip_low=0.99, clip_high=100.0))
    close(loss, expected.item())


def test_mismatch_is_prime_rl_s_and_the_mean_ratio_is_logged():
    tokens = make_tokens()
    _, _, sums = run(tokens, ClipLossConfig())
    log_ratio = (tokens.anchor_log_probs - tokens.sampler_log_probs)[MASK > 0]
    close(sums["mismatch_kl"], (log_ratio.exp() - log_ratio - 1).sum().item())
    close(sums["importance"], log_ratio.exp().sum().item())
    ratio = (tokens.log_probs - tokens.old_log_probs)[MASK > 0].exp()
    close(sums["ratio"], ratio.sum().item())
    terms = policy_loss(tokens, ClipLossConfig(), MASK.sum())
    close(terms.ratio_range.float(), torch.stack([-ratio.min(), ratio.max()]).detach())


@pytest.mark.parametrize("importance", ["truncate", "mask"])
def test_importance_correction_by_hand(importance):
    tokens = make_tokens()
    config = ClipLossConfig(
        clip_low=0.99,
        clip_high=100.0,
        old_log_probs="trainer",
        importance=importance,
        importance_low=0.8,
        importance_high=1.1,
    )
    expected, num_masked = 0.0, 0
    for row, position, log_prob, old, advantage in trained(tokens):
        anchor = tokens.anchor_log_probs[row, position].item()
        correction = math.exp(anchor - tokens.sampler_log_probs[row, position].item())
        is_outside = not 0.8 <= correction <= 1.1
        num_masked += is_outside
        factor = min(correction, 1.1) if importance == "truncate" else float(not is_outside)
        expected -= factor * math.exp(log_prob - old) * advantage / 9
    loss, _, sums = run(tokens, config)
    assert 0 < num_masked < 9
    close(loss, expected)
    assert sums["masked"] == (num_masked if importance == "mask" else 0)


def test_the_entropy_bonus_has_on_average_the_gradient_of_the_entropy():
    logits = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits.requires_grad_()
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum()
    (expected,) = torch.autograd.grad(entropy, logits, retain_graph=True)
    surrogate = entropy_surrogate(log_probs, entropy.detach().expand(6), torch.ones(6))
    (actual,) = torch.autograd.grad((log_probs.exp().detach() * surrogate).sum(), logits)
    torch.testing.assert_close(actual, expected)


def test_the_entropy_bonus_raises_the_entropy():
    tokens = make_tokens(advantages=torch.zeros(2, 8))
    _, gradient, _ = run(tokens, ClipLossConfig(entropy_coef=0.1))
    unlikely = (tokens.log_probs + tokens.entropy < 0) & (MASK > 0)
    assert unlikely.any()
    # Gradient descent raises what is less likely than the entropy says.
    assert (gradient[unlikely] < 0).all()


def test_k3_is_never_negative_and_zero_at_equality():
    assert k3(torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]
    assert (k3(torch.linspace(-3, 3, 13)) >= 0).all()


@pytest.mark.parametrize("config", [ClipLossConfig(), CISPOLossConfig(), GSPOLossConfig()])
def test_shares_of_micro_batches_add_up(config):
    tokens = make_tokens()
    whole, gradient, sums = run(tokens, config)
    total, gradients, part_sums = 0.0, [], torch.zeros(len(SUMS), dtype=torch.float64)
    for row in range(2):
        part = PolicyTokens(
            **{
                name: None if value is None else value[row : row + 1]
                for name, value in vars(tokens).items()
            }
        )
        terms = policy_loss(part, config, MASK.sum())
        (part_gradient,) = torch.autograd.grad(terms.loss, tokens.log_probs)
        total += terms.loss.item()
        gradients.append(part_gradient)
        part_sums += terms.sums
    close(total, whole)
    close(sum(gradients), gradient)
    close(part_sums.float(), torch.tensor([sums[name] for name in SUMS]))


def test_an_untrained_micro_batch_adds_zero_and_a_gradient_of_zero():
    tokens = make_tokens(weights=torch.zeros(2, 8))
    terms = policy_loss(tokens, GSPOLossConfig(kl_coef=0.0), torch.tensor(9.0))
    (gradient,) = torch.autograd.grad(terms.loss, tokens.log_probs)
    assert terms.loss.item() == 0.0
    assert gradient.abs().max() == 0.0
    assert terms.sums.abs().max() == 0.0
