"""Choice of tokens: the right distribution, from noise that belongs to the completion."""

import math

import torch

from trainer.rl.choice import TokenChoice, draw_noise, pick_tokens
from trainer.rl.engine import Sampling


def make_sampling(**changes):
    fields = {"max_new_tokens": 8, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_ids": (0,)}
    return Sampling(**(fields | changes))


def test_noise_depends_on_the_seed_alone_and_extends():
    seeds = [(1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 4, 4)]
    noise = draw_noise(seeds, 6)
    assert noise.dtype == torch.float64
    assert len(noise.unique()) == noise.numel()
    assert torch.equal(draw_noise(seeds[1:2], 6), noise[1:2])
    assert torch.equal(draw_noise(seeds, 3), noise[:, :3])


def test_tokens_are_picked_with_their_probabilities():
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.2])
    noise = torch.arange(0.0005, 1, 0.001, dtype=torch.float64)
    tokens = pick_tokens(probabilities.log().expand(1000, 4), noise)
    assert tokens.bincount(minlength=4).tolist() == [500, 0, 300, 200]


def test_excluded_tokens_are_never_picked():
    scores = torch.tensor([[-math.inf, 1.0, -math.inf], [0.0, -math.inf, -math.inf]])
    for value in (0.0, 0.5, 1 - 2**-53):
        tokens = pick_tokens(scores, torch.full((2,), value, dtype=torch.float64))
        assert tokens.tolist() == [1, 0]


def test_recorded_log_probs_are_at_the_temperature_and_over_the_whole_vocabulary():
    logits = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    choice = TokenChoice(
        make_sampling(temperature=0.5, top_k=2), draw_noise([(0, i) for i in range(5)], 1)
    )
    only = choice(torch.zeros(5, 1, dtype=torch.long), logits)
    tokens = only.argmax(-1)
    expected = (logits / 0.5).log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    assert torch.equal(choice.log_probs[0], expected)
    assert (only > -math.inf).sum() == 5
    top2 = logits.topk(2).indices
    assert all(token in row for token, row in zip(tokens.tolist(), top2.tolist(), strict=True))


def test_what_has_ended_ends_again():
    logits = torch.tensor([[9.0, 0.0, 0.0], [0.0, 9.0, 0.0]])
    choice = TokenChoice(make_sampling(temperature=0.0), draw_noise([(0,), (1,)], 2))
    ids = torch.zeros(2, 1, dtype=torch.long)
    assert choice.first(ids, logits).tolist() == [0, 1]
    assert choice(ids, logits.flip(0)).argmax(-1).tolist() == [0, 0]
