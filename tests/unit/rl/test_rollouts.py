import json
from dataclasses import replace

from tests.support.rollouts import ROLLOUTS
from trainer.rl.rollouts import (
    Rollout,
    cut_rollouts_after,
    in_groups,
    pass_rates,
    write_rollouts,
)


def test_a_rollout_survives_json_exactly():
    for rollout in ROLLOUTS:
        state = json.loads(json.dumps(rollout.state_dict()))
        assert Rollout.from_state(state) == rollout


def test_files_hold_one_rollout_a_line_and_later_ones_are_cut(tmp_path):
    folder = tmp_path / "rollouts"
    for step in (1, 3, 12):
        write_rollouts(ROLLOUTS, folder, step)
    lines = (folder / "step_3.jsonl").read_text().splitlines()
    assert [Rollout.from_state(json.loads(line)) for line in lines] == ROLLOUTS
    cut_rollouts_after(folder, 3)
    assert sorted(path.name for path in folder.iterdir()) == ["step_1.jsonl", "step_3.jsonl"]


def test_text_with_line_breaks_of_unicode_stays_on_its_line(tmp_path):
    rollout = replace(ROLLOUTS[0], completion="a\x85b\u2028c\u2029d é")
    write_rollouts([rollout, rollout], tmp_path, 1)
    text = (tmp_path / "step_1.jsonl").read_text()
    assert [Rollout.from_state(json.loads(line)) for line in text.splitlines()] == [rollout] * 2
    assert "é" in text


def test_groups_are_runs_of_rollouts():
    assert in_groups(ROLLOUTS[:4], 2) == [tuple(ROLLOUTS[:2]), tuple(ROLLOUTS[2:4])]


def test_pass_rates_of_a_mix_are_told_apart():
    passes = {"a": [True, False], "b": [True, True, False, True]}
    rollouts = [
        replace(ROLLOUTS[0], source=source, is_pass=is_pass)
        for source, values in passes.items()
        for is_pass in values
    ]
    assert pass_rates("rate", rollouts) == {"rate": 4 / 6, "rate/a": 0.5, "rate/b": 0.75}
    alone = [replace(rollout, source="") for rollout in rollouts]
    assert pass_rates("rate", alone) == {"rate": 4 / 6}
