"""Runs that a failure ends: what they leave in their folder."""

import itertools
import sys
import types

import pytest
import torch

from tests.support.metrics import repeatable_metrics
from tests.support.rl_configs import part_ascii, rl_config
from trainer.errors import UserError
from trainer.loops.rl import reference, run_rl


@pytest.fixture(autouse=True)
def one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(False)


def test_a_reference_model_that_cannot_be_built_leaves_the_folder_free(tmp_path, monkeypatch):
    def fail(*arguments, **settings):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(reference, "start_model", fail)
    folder = tmp_path / "run"
    with pytest.raises(RuntimeError, match="out of memory"):
        run_rl(rl_config(folder, loss={"kl_coef": 0.1}, max_steps=1))
    monkeypatch.undo()
    assert not folder.exists() or not list(folder.glob("*"))


@pytest.mark.parametrize("field", ["num_prompts", "num_samples"])
def test_rollouts_that_no_host_holds_are_refused_before_a_model_is_built(tmp_path, field):
    with pytest.raises(UserError, match=rf"rollout\.{field}=1000000000000: .* stay well below"):
        run_rl(rl_config(tmp_path / "run", rollout={field: 10**12}, max_steps=1))
    assert not (tmp_path / "run").exists()


def test_a_reward_that_fails_in_mid_run_loses_no_step(tmp_path, monkeypatch):
    module = types.ModuleType("failing_rewards")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    env = {
        "rewards": [{"type": "function", "path": "failing_rewards:score"}],
        "on_reward_error": "error",
    }

    def run(name, **changes):
        run_rl(rl_config(tmp_path / name, env=env, max_steps=3, **changes))

    module.score = part_ascii
    run("whole")
    # Five held-out answers, then twelve samples a step: the last step's first sample fails.
    calls = itertools.count()
    module.score = lambda sample: part_ascii(sample) if next(calls) < 29 else None
    with pytest.raises(UserError, match=r"'score' failed on .*; the state after step 2 is saved"):
        run("parted")
    module.score = part_ascii
    run("parted", ckpt={"resume": "latest"})
    assert repeatable_metrics(tmp_path / "parted") == repeatable_metrics(tmp_path / "whole")
