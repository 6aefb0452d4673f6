import json
import signal
from pathlib import Path

import pytest

from tests.support.tiny import row, write_tiny_run
from trainer.cli.main import main
from trainer.parallel.signals import StopSignal

LATEST = ["--ckpt.resume", "latest"]
EVALUATED = ["--val.fraction", "0.3", "--val.interval", "1"]


def records(folder: Path) -> list[dict]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def saved_steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())


def losses(folder: Path) -> list[tuple]:
    return [
        (record["step"], record["loss/mean"], record.get("val/loss")) for record in records(folder)
    ]


@pytest.fixture
def stopped_at(monkeypatch: pytest.MonkeyPatch):
    """Return what sends a SIGTERM just before the n-th time that the ranks agree."""

    def stop(number: int) -> None:
        calls = iter(range(1, 1000))
        monkeypatch.setattr(
            StopSignal, "agreed", lambda _: signal.SIGTERM if next(calls) == number else None
        )

    return stop


def test_a_signal_ends_an_evaluation_which_the_resumed_run_makes_up_for(
    tmp_path: Path, stopped_at, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir()
    stopped.mkdir()
    assert main([*write_tiny_run(whole), *EVALUATED]) == 0
    words = [*write_tiny_run(stopped), *EVALUATED]

    stopped_at(1)  # ahead of the first batch of the evaluation after step 1
    assert main(words) == 143
    assert saved_steps(stopped) == ["step_1"]
    assert "val/loss" not in records(stopped)[0]

    monkeypatch.undo()
    assert main([*words, *LATEST]) == 0
    assert losses(stopped) == losses(whole)


def test_a_signal_ends_the_answers_before_training(
    tmp_path: Path, stopped_at, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*write_tiny_run(tmp_path), *EVALUATED, "--val.num-generate", "2"]
    stopped_at(1)
    assert main(words) == 143
    assert (saved_steps(tmp_path), records(tmp_path)) == (["step_0"], [])
    monkeypatch.undo()
    assert main([*words, *LATEST]) == 0
    assert [record["step"] for record in records(tmp_path)] == [1, 2]


def test_a_bad_row_in_mid_run_loses_no_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps(row(f"hello {index}")) for index in range(16)]
    words = write_tiny_run(tmp_path, [*lines, "{", *lines])
    words += ["--data.shuffle", "false", "--data.pack-lookahead", "1", "--max-steps", "4"]
    assert main(words) == 2
    message = capsys.readouterr().err
    step = len(records(tmp_path))
    assert step > 0
    assert "rows.jsonl:17: the line is not JSON" in message
    assert f"the state after step {step} is saved" in message
    assert saved_steps(tmp_path) == [f"step_{step}"]

    skip = ["--data.on-bad-row", "skip"]
    assert main([*words, *LATEST, *skip]) == 0
    assert main([*words, *skip, "--output-dir", str(tmp_path / "whole" / "run")]) == 0
    assert losses(tmp_path) == losses(tmp_path / "whole")


def test_a_row_that_is_bad_from_the_start_leaves_the_folder_free(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = write_tiny_run(tmp_path, ["{"])
    assert main(words) == 2
    assert "rows.jsonl:1: the line is not JSON" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main(write_tiny_run(tmp_path)) == 0
