import errno
import json
import logging
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tests.support.tiny import row, write_tiny_run
from trainer.checkpoint import CheckpointStore
from trainer.cli.main import main
from trainer.errors import UserError
from trainer.loops import assembly
from trainer.loops.assembly import _check_vocabulary

LATEST = ["--ckpt.resume", "latest"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny run of two steps, a checkpoint after each."""
    folder = tmp_path_factory.mktemp("finished")
    assert main([*write_tiny_run(folder), "--ckpt.interval", "1"]) == 0
    return folder


@pytest.fixture
def words(finished: Path, tmp_path: Path) -> list[str]:
    """A copy of the finished run in `tmp_path`; words that resume it."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return [*write_tiny_run(tmp_path), *LATEST]


def record(folder: Path) -> list[int]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_a_run_that_ends_before_its_checkpoint_is_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--max-steps", "1"]) == 2
    assert "max_steps=1: the checkpoint is of step 2, beyond" in capsys.readouterr().err
    assert record(tmp_path) == [1, 2]


def test_data_of_another_size_is_refused_before_the_record_is_touched(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row()) + "\n")
    assert main([*words, "--max-steps", "4", "--ckpt.resume", "1"]) == 2
    assert "rows in data.source: [1] in this run, [16] in" in capsys.readouterr().err
    assert record(tmp_path) == [1, 2]
    assert not (tmp_path / "run" / "config.resume-1.toml").exists()


FUNCTION = ["--data.source.type", "function", "--data.source.path"]
MODULE = """
def rows():
    lines = [f"hello {i}" for i in range(16)]
    return [{"prompt": line, "completion": line[::-1]} for line in lines]

def renamed():
    return rows()

def others():
    return [*rows()[:3], {"prompt": "3", "completion": "4"}, *rows()[4:]]
"""


def test_a_function_may_be_renamed_but_not_make_other_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows_of_assembly.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    words = [*write_tiny_run(tmp_path), *LATEST, *FUNCTION]
    assert main([*words, "rows_of_assembly:rows", "--max-steps", "1"]) == 0
    assert main([*words, "rows_of_assembly:others"]) == 2
    assert "rows of functions in data.source: {'0': '" in capsys.readouterr().err
    assert record(tmp_path) == [1]
    assert main([*words, "rows_of_assembly:renamed"]) == 0
    assert record(tmp_path) == [1, 2]


def test_weights_that_a_kill_prevented_are_written_on_resume(
    words: list[str], tmp_path: Path
) -> None:
    weights = tmp_path / "run" / "weights" / "step_2" / "model.safetensors"
    before = weights.read_bytes()
    shutil.rmtree(weights.parents[1])
    assert main(words) == 0
    assert weights.read_bytes() == before
    assert record(tmp_path) == [1, 2]


def test_latest_is_of_the_course_that_a_resume_has_taken(
    words: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    other_lr = ["--optim.lr", "0.001", "--ckpt.interval", "1"]
    assert main([*words, *other_lr, "--ckpt.resume", "1", "--max-steps", "1"]) == 0
    assert "set aside as" in caplog.text
    assert "step_2.abandoned" in caplog.text
    assert "stay" not in caplog.text
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "step_1",
        "step_2.abandoned",
    ]
    # Weights of step 2 would not be written anew if those of the old course were still there.
    assert sorted(path.name for path in (run / "weights").iterdir()) == [
        "step_1",
        "step_2.abandoned",
    ]
    assert main([*words, *other_lr, "--max-steps", "3"]) == 0
    assert record(tmp_path) == [1, 2, 3]
    assert (run / "checkpoints" / "step_2").is_dir()
    assert "not a checkpoint" not in caplog.text


def test_steps_to_profile_that_are_past_are_named(
    words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main([*words, "--max-steps", "3", "--profile.trace-steps", "1", "2"]) == 0
    assert "profile.trace_steps=[1, 2]: [1, 2] are not profiled, the run resumes" in caplog.text


def test_packs_longer_than_the_models_positions_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert main([*write_tiny_run(tmp_path), "--max-steps", "1", "--data.seq-len", "257"]) == 0
    assert "data.seq_len=257 exceeds the model's max_position_embeddings=256" in caplog.text


def test_an_interval_of_validation_without_rows_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*write_tiny_run(tmp_path), "--max-steps", "1", "--val.interval", "1"]) == 0
    assert "val.interval=1: neither val.source nor val.fraction" in capsys.readouterr().out


def test_a_run_that_wandb_refused_can_be_launched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    words = [*write_tiny_run(tmp_path), "--max-steps", "1"]
    assert main([*words, "--wandb.enabled", "--wandb.project", "a/b"]) == 2
    assert "wandb.project='a/b'" in capsys.readouterr().err
    assert main(words) == 0


def test_a_run_that_diverges_records_every_step_up_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[str] = []
    monkeypatch.setattr(CheckpointStore, "wait", lambda _: waits.append("for a save under way"))
    words = [*write_tiny_run(tmp_path), "--max-steps", "9", "--optim.type", "sgd"]
    words += ["--optim.lr", "1e38", "--optim.max-norm", "None", "--optim.max-skipped-steps", "3"]
    with pytest.raises(RuntimeError, match=r"3 steps in a row .* \(up to step 4; "):
        main(words)
    assert waits
    assert record(tmp_path) == [1, 2, 3, 4]
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["optim/skipped_steps"], last["loss/mean"]) == (3, None)


@pytest.mark.parametrize(("largest_id", "is_refused"), [(95, False), (96, True)])
def test_ids_with_gaps_must_have_rows_too(largest_id, is_refused):
    words = WordLevel({"a": 0, "b": largest_id}, unk_token="a")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))
    refusal = pytest.raises(UserError, match="ids reach 96, the model's vocab_size=96")
    with refusal if is_refused else nullcontext():
        _check_vocabulary(96, tokenizer)


def test_a_disk_that_is_full_at_the_start_is_named_with_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    words = [*write_tiny_run(tmp_path), "--max-steps", "1"]
    with monkeypatch.context() as full:
        full.setattr(assembly, "write_config", refuse)
        assert main(words) == 2
    message = f"output_dir='{tmp_path}/run': a run cannot write there ([Errno 28] No space left"
    assert message in capsys.readouterr().err
    assert main(words) == 0, "the folder is free once there is room"


@pytest.fixture
def from_weights(finished: Path, tmp_path: Path) -> list[str]:
    """Words of a run that starts from weights in `tmp_path/start`; its first step is done."""
    shutil.copytree(finished / "run" / "weights" / "step_2", tmp_path / "start")
    words = write_tiny_run(tmp_path)
    words += ["--model.name", str(tmp_path / "start"), "--model.weights", "pretrained"]
    assert main([*words, "--max-steps", "1"]) == 0
    return words


def test_a_run_goes_on_though_what_it_started_from_has_gone(
    from_weights: list[str], tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    assert main([*from_weights, "--output-dir", str(whole)]) == 0
    shutil.rmtree(tmp_path / "start")
    assert main([*from_weights, *LATEST]) == 0
    assert record(tmp_path) == [1, 2]
    again, first = (
        folder / "weights" / "step_2" / "model.safetensors" for folder in (tmp_path / "run", whole)
    )
    assert again.read_bytes() == first.read_bytes()


def test_another_name_than_the_checkpoints_must_fit_it(
    from_weights: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = (tmp_path / "start").rename(tmp_path / "moved")
    assert main([*from_weights, *LATEST, "--model.name", str(moved)]) == 0
    other = moved.rename(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    assert main([*from_weights, *LATEST, "--max-steps", "3", "--model.name", str(other)]) == 2
    assert "num_hidden_layers=1 but" in capsys.readouterr().err
    assert record(tmp_path) == [1, 2]
