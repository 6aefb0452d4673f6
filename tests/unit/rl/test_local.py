"""The local engine: completions, their log-probabilities, and what goes through the model."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.support.meshes import one_rank_mesh
from tests.support.networks import dense_architecture, moe_architecture, random_model
from trainer.model import setup_model
from trainer.model.inference import inference
from trainer.rl.engine import Request, Sampling
from trainer.rl.local import LocalEngine

PROMPTS = [(5, 9, 12, 3), (7, 2), (11, 4, 6, 8, 1, 9)]
STOP = 13
SAMPLING = Sampling(max_new_tokens=6, temperature=0.8, top_p=1.0, top_k=0, stop_ids=(STOP,))
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["moe", "dense"])
def model(request) -> Iterator:
    architecture = moe_architecture() if request.param == "moe" else dense_architecture()
    with one_rank_mesh() as mesh:
        yield setup_model(random_model(architecture), mesh, seed=3)


def requests_for(prompts, num_samples=3):
    return [
        Request(prompt, tuple((0, 0, i, j) for j in range(num_samples)))
        for i, prompt in enumerate(prompts)
    ]


def make_engine(model, batch_size=64):
    return LocalEngine(model, inference, CPU, pad_id=0, batch_size=batch_size)


def trainer_log_probs(model, prompt, ids, temperature):
    """The training forward's log-probabilities of a completion."""
    tokens = torch.tensor([[*prompt, *ids]])
    targets = torch.full_like(tokens, -100)
    targets[0, len(prompt) - 1 : -1] = torch.tensor(ids)
    outputs = model(
        tokens,
        position_ids=torch.arange(tokens.shape[1]).unsqueeze(0),
        target_ids=targets,
        temperature=temperature,
    )
    return outputs.log_probs_PS[0, len(prompt) - 1 : -1].detach()


@pytest.mark.parametrize(
    "sampling",
    [SAMPLING, replace(SAMPLING, top_k=5, top_p=0.7), replace(SAMPLING, max_new_tokens=1)],
    ids=["plain", "top-k and top-p", "one token"],
)
def test_log_probs_are_those_of_the_training_forward(model, sampling):
    results = make_engine(model).generate(requests_for(PROMPTS), sampling)
    for prompt, completions in zip(PROMPTS, results, strict=True):
        for completion in completions:
            expected = trainer_log_probs(model, prompt, completion.ids, sampling.temperature)
            actual = torch.tensor(completion.log_probs)
            # fp32, other shapes of the same sums.
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_a_completion_ends_with_its_first_stop_token_or_is_truncated(model):
    sampling = replace(SAMPLING, stop_ids=tuple(range(0, 64, 3)))
    completions = [
        completion
        for group in make_engine(model).generate(requests_for(PROMPTS, 8), sampling)
        for completion in group
    ]
    lengths = {len(completion.ids) for completion in completions}
    assert 1 in lengths, "some end with their first token, which generate does not choose"
    assert len(lengths) > 2
    for completion in completions:
        stops = [token % 3 == 0 for token in completion.ids]
        assert not any(stops[:-1])
        assert completion.is_truncated == (not stops[-1])
        assert len(completion.log_probs) == len(completion.ids)
        assert not completion.is_truncated or len(completion.ids) == sampling.max_new_tokens


def test_a_completion_depends_on_prompt_and_seed_only(model):
    together = make_engine(model).generate(requests_for(PROMPTS), SAMPLING)
    one_group_at_a_time = make_engine(model, batch_size=1).generate(requests_for(PROMPTS), SAMPLING)
    assert [[c.ids for c in group] for group in together] == [
        [c.ids for c in group] for group in one_group_at_a_time
    ]
    assert len({c.ids for c in together[0]}) > 1


def test_greedy_completions_are_those_of_transformers(model):
    results = make_engine(model).generate(requests_for(PROMPTS, 1), SAMPLING.greedy())
    for prompt, (completion,) in zip(PROMPTS, results, strict=True):
        with torch.no_grad():
            expected = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=6,
                do_sample=False,
                eos_token_id=STOP,
                pad_token_id=0,
            )
        assert list(completion.ids) == expected[0, len(prompt) :].tolist()


def test_each_prompt_goes_through_the_model_once(model):
    counted = []
    hook = model.model.embed_tokens.register_forward_hook(
        lambda module, inputs, output: counted.append(inputs[0].numel())
    )
    sampling = replace(SAMPLING, stop_ids=(63,), top_k=1)
    try:
        results = make_engine(model).generate(requests_for(PROMPTS, 5), sampling)
    finally:
        hook.remove()
    num_prompt_tokens = 3 * max(len(prompt) for prompt in PROMPTS)
    longest = max(len(c.ids) for group in results for c in group)
    assert counted[0] == num_prompt_tokens
    assert sum(counted) == num_prompt_tokens + 15 * (longest - 1)


def test_generation_leaves_the_model_as_it_was(model):
    model.train()
    make_engine(model).generate(requests_for(PROMPTS[:1], 1), SAMPLING)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_completions_carry_the_version_that_was_pushed(model):
    engine = make_engine(model)
    engine.push_weights(7)
    ((completion,),) = engine.generate(requests_for(PROMPTS[:1], 1), SAMPLING)
    assert completion.version == engine.weights_version() == 7


def test_sampling_is_given_up_before_a_batch_and_leaves_the_model_as_it_was(model):
    asked = []

    def before_batch():
        asked.append(None)
        if len(asked) == 3:
            raise KeyboardInterrupt

    engine = make_engine(model, batch_size=3)
    engine.generate(requests_for(PROMPTS[:2]), SAMPLING, before_batch)
    assert len(asked) == 2
    with pytest.raises(KeyboardInterrupt):
        engine.generate(requests_for(PROMPTS), SAMPLING, before_batch)
    assert model.training
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_completions_end_at_the_token_before_which_they_are_given_up(model):
    asked = itertools.count(1)
    completions = make_engine(model).generate(
        requests_for(PROMPTS),
        replace(SAMPLING, max_new_tokens=500),
        is_given_up=lambda: next(asked) >= 3,
    )
    assert next(asked) == 4
    assert {c.ids[-1] for group in completions for c in group} == {STOP}
    assert max(len(c.ids) for group in completions for c in group) == 3
