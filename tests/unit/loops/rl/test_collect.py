"""From prompts to rollouts, with an engine behind HTTP in the model's place."""

import signal
import sys
import types

import pytest

from tests.support.http_engine import HttpEngine, serve
from tests.support.meshes import one_rank_mesh
from tests.support.rl_configs import prompts_file, rl_config
from trainer.data import build_byte_tokenizer
from trainer.errors import Interrupted, UserError
from trainer.loops.rl.collect import Collector
from trainer.loops.rl.judge import Judge
from trainer.loops.rl.prompts import setup_prompts
from trainer.loops.rl.run import stop_ids
from trainer.parallel import watchdog
from trainer.rl.engine import Sampling
from trainer.rl.scoring import Scorer

TOKENIZER = build_byte_tokenizer()
STOP = TOKENIZER.eos_token_id
ROWS = [{"question": f"question {i}", "answer": "b"} for i in range(40)]


@pytest.fixture(autouse=True, scope="module")
def one_rank():
    with one_rank_mesh():
        yield


@pytest.fixture
def rewards_module(monkeypatch):
    module = types.ModuleType("rewards_of_this_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def function_reward(module, function, **fields):
    setattr(module, function.__name__, function)
    return {"type": "function", "path": f"{module.__name__}:{function.__name__}"} | fields


def collect(folder, engine, rewards, *, version=3, stops=None, **changes):
    env = {"source": prompts_file(folder, ROWS), "rewards": rewards} | changes.pop("env", {})
    config = rl_config(folder, env=env, val={"source": None}, **changes)
    stream = setup_prompts(config, TOKENIZER).train
    sampling = Sampling.from_config(config.rollout, stop_ids(config, TOKENIZER))
    judge = Judge(config, TOKENIZER, Scorer.from_config(config.env))
    collector = Collector(config, engine, sampling, judge, **(stops or {}))
    return collector.collect(stream, 1, version)


def length_of_completion(sample):
    return len(sample.completion)


def broken_on_some(sample):
    return 1.0 if "a" in sample.completion else None


def test_rollouts_carry_what_was_asked_written_and_earned(tmp_path, rewards_module):
    rewards = [
        function_reward(rewards_module, length_of_completion),
        {"type": "exact_match", "weight": 0.5},
    ]
    with serve() as (_, engine):
        batch = collect(tmp_path, engine, rewards)
    assert [len(group) for group in batch.groups] == [3, 3, 3, 3]
    for number, group in enumerate(batch.groups):
        mean = sum(rollout.reward for rollout in group) / 3
        for rollout in group:
            text = rollout.completion
            assert rollout.group == number
            assert rollout.prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
            assert (rollout.ids[-1] == STOP) != rollout.is_truncated
            assert text == bytes(i for i in rollout.ids if i != STOP).decode()
            assert rollout.scores == {
                "length_of_completion": len(text),
                "exact_match": float(text == "b"),
            }
            assert rollout.reward == len(text) + 0.5 * (text == "b")
            assert rollout.advantage == pytest.approx(rollout.reward - mean)
            assert rollout.version == 3
    rewards = [rollout.reward for group in batch.groups for rollout in group]
    assert batch.metrics["reward/mean"] == pytest.approx(sum(rewards) / 12)
    assert batch.metrics["rollout/weights_version"] == 3
    assert 0 < batch.metrics["rollout/truncated"] < 1


def test_rewards_know_how_long_a_completion_is_and_whether_it_was_cut(tmp_path, rewards_module):
    def tokens_of_whole(sample):
        return -1.0 if sample.is_truncated else sample.num_tokens

    with serve() as (_, engine):
        batch = collect(tmp_path, engine, [function_reward(rewards_module, tokens_of_whole)])
    rollouts = [rollout for group in batch.groups for rollout in group]
    assert {rollout.is_truncated for rollout in rollouts} == {True, False}
    for rollout in rollouts:
        assert rollout.reward == (-1.0 if rollout.is_truncated else len(rollout.ids))


def test_a_rank_that_hangs_would_be_named_with_what_it_does(tmp_path, rewards_module):
    phases = []

    def note_phase(sample):
        phases.append(watchdog._watchdog.phase)
        return 1.0

    watchdog.start(0, 1, 1.0, None)
    try:
        with serve() as (_, engine):
            collect(tmp_path, engine, [function_reward(rewards_module, note_phase)])
    finally:
        watchdog.stop()
    assert {(phase.name, phase.is_timed) for phase in phases} == {("score", False)}
    assert phases[0].count == 2, "after sampling"


def test_an_engine_that_samples_with_other_weights_is_refused(tmp_path):
    with serve(is_stuck=True) as (_, engine), pytest.raises(RuntimeError) as caught:
        collect(tmp_path, engine, [{"type": "exact_match"}])
    assert "weights of version 0 after version 3 was pushed" in str(caught.value)


def test_truncated_completions_are_penalized_if_asked(tmp_path, rewards_module):
    rewards = [function_reward(rewards_module, length_of_completion)]
    rollout = {"truncated": "penalize", "truncation_penalty": 2.5}
    with serve() as (_, engine):
        batch = collect(tmp_path, engine, rewards, rollout=rollout)
    for sample in (sample for group in batch.groups for sample in group):
        assert sample.reward == len(sample.completion) - 2.5 * sample.is_truncated


def test_constant_groups_give_zero_and_are_counted(tmp_path):
    with serve() as (_, engine):
        batch = collect(tmp_path, engine, [{"type": "exact_match", "weight": 0.0}])
    assert all(rollout.advantage == 0.0 for group in batch.groups for rollout in group)
    assert batch.metrics["rollout/constant_groups"] == 1.0
    assert batch.metrics["rollout/resampled_groups"] == 0


def passes_from_the_sixth_prompt_on(sample):
    number = int(sample.question.removeprefix("question "))
    return len(sample.completion) if number >= 6 else 0.0


@pytest.mark.parametrize(("attempts", "num_resampled"), [(1, 4), (2, 6)])
def test_constant_groups_are_replaced_by_further_prompts(
    tmp_path, rewards_module, attempts, num_resampled
):
    rewards = [function_reward(rewards_module, passes_from_the_sixth_prompt_on)]
    with serve() as (server, engine):
        batch = collect(
            tmp_path, engine, rewards, rollout={"resample": attempts}, env={"shuffle": False}
        )
    # Prompts 0-3 are constant; of 4-7, which replace them, 4 and 5 are; 8 and 9 replace these.
    questions = [int(group[0].where.rpartition(":")[2]) - 1 for group in batch.groups]
    assert questions == ([4, 5, 6, 7] if attempts == 1 else [8, 9, 6, 7])
    assert batch.metrics["rollout/resampled_groups"] == num_resampled
    assert server.num_prompts == 4 + num_resampled
    seeds = {rollout.ids + rollout.log_probs for group in batch.groups for rollout in group}
    assert len(seeds) > 1


def test_a_rank_that_is_asked_to_stop_scores_no_further_sample(tmp_path, rewards_module):
    scored = []

    def slow(sample):
        scored.append(sample)
        return 1.0

    def stop_if_asked():
        if len(scored) >= 4:
            raise Interrupted(signal.SIGTERM)

    stops = {"is_asked_to_stop": lambda: len(scored) >= 4, "stop_if_asked": stop_if_asked}
    with serve() as (_, engine), pytest.raises(Interrupted):
        collect(tmp_path, engine, [function_reward(rewards_module, slow)], stops=stops)
    assert len(scored) == 4


def fails_before_the_sixth_prompt(sample):
    return 1 / max(0, int(sample.question.removeprefix("question ")) - 5) + len(sample.completion)


def test_failures_in_groups_that_are_replaced_count_too(tmp_path, rewards_module):
    rewards = [function_reward(rewards_module, fails_before_the_sixth_prompt)]
    with serve() as (_, engine):
        changes = {"rollout": {"resample": 2}, "env": {"shuffle": False}}
        batch = collect(tmp_path, engine, rewards, **changes)
    assert not any(rollout.num_errors for group in batch.groups for rollout in group)
    assert batch.metrics["reward/errors"] == 6 * 3


def test_a_failing_reward_is_counted_or_ends_the_run(tmp_path, rewards_module):
    rewards = [function_reward(rewards_module, broken_on_some)]
    with serve() as (_, engine):
        batch = collect(tmp_path, engine, rewards)
        num_failed = sum("a" not in r.completion for group in batch.groups for r in group)
        assert num_failed > 0
        assert batch.metrics["reward/errors"] == num_failed
        with pytest.raises(UserError, match=r"'broken_on_some' failed on .*prompts\.jsonl:\d+"):
            collect(tmp_path, engine, rewards, env={"on_reward_error": "error"})


def test_stop_tokens_end_completions_and_unknown_ones_are_refused(tmp_path):
    config = rl_config(tmp_path, rollout={"stop_tokens": ["c", "<|im_start|>"]})
    assert stop_ids(config, TOKENIZER) == [STOP, ord("c"), 257]
    config = rl_config(tmp_path, rollout={"stop_tokens": ["stop"]})
    with pytest.raises(UserError, match=r"rollout\.stop_tokens=\['stop'\]: 'stop' is no single"):
        stop_ids(config, TOKENIZER)


def test_evaluation_takes_one_answer_a_prompt(tmp_path):
    config = rl_config(tmp_path)
    sampling = Sampling.from_config(config.rollout, stop_ids(config, TOKENIZER))
    held_out = setup_prompts(config, TOKENIZER).held_out
    with serve() as (server, engine):
        assert isinstance(engine, HttpEngine)
        judge = Judge(config, TOKENIZER, Scorer.from_config(config.env))
        answers = Collector(config, engine, sampling, judge).evaluate(held_out, 5)
        assert server.version == 5
    assert [answer.where for answer in answers] == [prompt.where for prompt in held_out]
