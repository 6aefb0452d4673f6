"""A run of RL that stops and resumes, rollouts in flight, is the run that never stopped."""

import itertools
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.metrics import repeatable_metrics
from tests.support.rl_configs import rl_config
from tests.support.spawn import run_ranks

pytestmark = pytest.mark.distributed

LATEST = {"ckpt": {"resume": "latest"}}
CHANGES: dict[str, Any] = {
    "rollout": {"num_updates": 2, "temperature": 0.9},
    "loss": {"old_log_probs": "trainer", "kl_coef": 0.05, "advantage": "std"},
    "val": {"interval": 2},
}


OTHERWISE: dict[str, dict[str, Any]] = {
    "rollout.temperature=0.5: ": {"rollout": {"num_updates": 2, "temperature": 0.5}},
    "rollout.num_updates=4: ": {"rollout": {"num_updates": 4, "temperature": 0.9}},
    "loss.old_log_probs='sampler': ": {"loss": {"kl_coef": 0.05, "advantage": "std"}},
}
"""Changes that rollouts in flight do not bear, by the beginning of the refusal."""


def run_all(folder: str) -> list[str]:
    from trainer.errors import UserError
    from trainer.loops.rl import run_rl

    whole, parted = Path(folder) / "whole", Path(folder) / "parted"
    run_rl(rl_config(whole, max_steps=5, **CHANGES))
    # Step 3 is the first of the two on the second batch: the other half is in flight.
    run_rl(rl_config(parted, max_steps=3, **CHANGES))
    shutil.copytree(parted, Path(folder) / "on two")
    messages = []
    for changes in OTHERWISE.values():
        with pytest.raises(UserError) as caught:
            run_rl(rl_config(parted, max_steps=5, **LATEST, **(CHANGES | changes)))
        messages.append(str(caught.value))
    run_rl(rl_config(parted, max_steps=5, **LATEST, **CHANGES))
    return messages


def run_with_stops(folder: str) -> list[int]:
    """Stop a run while it evaluates and while it samples; return the steps it saved."""
    from trainer.errors import Interrupted
    from trainer.loops.rl import run_rl
    from trainer.parallel.signals import StopSignal

    run = Path(folder) / "stopped"
    # Each decoding asks once, and each scoring: an evaluation is decoded in one part, a batch in
    # two; then each of its two steps asks. Every run begins where the one before was stopped, but
    # for the evaluation of step 2: its checkpoint keeps that it is due; a second save does nothing.
    stops = {
        "evaluation at the start": 1,
        "first batch": 4,
        "scores of the first batch": 5,
        "evaluation of step 2": 7,
        "second batch": 4,
        "evaluation at the end": 13,
        "nowhere": None,
    }
    for call in stops.values():
        asked = itertools.count(1)
        StopSignal.agreed = lambda self, c=call, n=asked: signal.SIGTERM if next(n) == c else None
        config = rl_config(run, max_steps=5, **LATEST, **CHANGES)
        if call is None:
            run_rl(config)
        else:
            with pytest.raises(Interrupted):
                run_rl(config)
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").iterdir())


def resume_on_two(folder: str) -> None:
    from trainer.loops.rl import run_rl

    run_rl(rl_config(Path(folder) / "on two", max_steps=5, **LATEST, **CHANGES))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    (messages,) = run_ranks(1, run_all, str(folder), timeout_s=200)
    (folder / "refusals.json").write_text(json.dumps(messages))
    run_ranks(2, resume_on_two, str(folder), timeout_s=200)
    (saved,) = run_ranks(1, run_with_stops, str(folder), timeout_s=200)
    assert saved == [0, 2, 5]
    return folder / "whole", folder / "parted"


def test_weights_are_bitwise_those_of_the_whole_run(folders):
    whole, parted = (folder / "weights" / "step_5" / "model.safetensors" for folder in folders)
    assert whole.read_bytes() == parted.read_bytes()


def test_metrics_are_those_of_the_whole_run(folders):
    whole, parted = (repeatable_metrics(folder) for folder in folders)
    assert [line["step"] for line in parted] == [1, 2, 3, 4, 5]
    # The end of the first part was evaluated as such, step 3 of the whole run was not.
    parted[2] = {name: v for name, v in parted[2].items() if not name.startswith("val/")}
    assert parted == whole


def test_rollouts_are_those_of_the_whole_run(folders):
    whole, parted = (folder / "rollouts" for folder in folders)
    names = sorted(path.name for path in whole.iterdir())
    assert names == ["step_1.jsonl", "step_3.jsonl", "step_5.jsonl"]
    assert names == sorted(path.name for path in parted.iterdir())
    for name in names:
        assert (whole / name).read_bytes() == (parted / name).read_bytes()


def test_rollouts_in_flight_refuse_what_they_were_not_made_under(folders):
    messages = json.loads((folders[0].parent / "refusals.json").read_text())
    for beginning, message in zip(OTHERWISE, messages, strict=True):
        assert message.startswith(beginning)
        assert "12 rollouts made under" in message


def test_two_ranks_go_on_with_rollouts_in_flight(folders):
    whole, on_two = (
        repeatable_metrics(folder) for folder in (folders[0], folders[0].parent / "on two")
    )
    for line, reference in zip(on_two[3:], whole[3:], strict=True):
        for name in ("reward/mean", "rollout/weights_version", "rollout/off_policy_steps"):
            assert line[name] == reference[name]
        for name in ("loss/mean", "optim/grad_norm", "reference_kl/mean", "ratio/max"):
            # fp32 sums over another split.
            assert line[name] == pytest.approx(reference[name], abs=1e-5, rel=1e-4), name


def test_a_run_stopped_while_it_samples_or_evaluates_is_the_whole_run(folders):
    whole, stopped = folders[0], folders[0].parent / "stopped"
    weights = Path("weights") / "step_5" / "model.safetensors"
    assert (stopped / weights).read_bytes() == (whole / weights).read_bytes()
    assert repeatable_metrics(stopped) == repeatable_metrics(whole)
    for path in (whole / "rollouts").iterdir():
        assert (stopped / "rollouts" / path.name).read_bytes() == path.read_bytes()


def test_later_updates_of_a_batch_are_off_policy_and_say_so(folders):
    lines = repeatable_metrics(folders[0])
    assert [line["rollout/off_policy_steps"] for line in lines] == [0, 1, 0, 1, 0]
    assert [line["rollout/weights_version"] for line in lines] == [0, 0, 2, 2, 4]
    assert lines[1]["ratio/max"] > 1.001
    # Both train on one batch; the time of sampling it belongs to the first.
    assert lines[1]["reward/mean"] == lines[0]["reward/mean"]
    raw = (folders[0] / "metrics.jsonl").read_text().splitlines()
    assert ["time/rollout" in json.loads(line) for line in raw] == [True, False] * 2 + [True]
    assert lines[1]["mismatch_kl/mean"] == pytest.approx(0.0, abs=1e-9)
    assert lines[1]["reference_kl/mean"] > 0 == lines[0]["reference_kl/mean"]
