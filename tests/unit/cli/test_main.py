import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from trainer.cli.main import main
from trainer.config import SFTConfig, load_config
from trainer.errors import Interrupted, UserError
from trainer.loops import sft

DEMO = ["sft", "@", "configs/sft/demo.toml"]


@pytest.fixture
def runs(monkeypatch):
    """Configs that reached the loop, which does nothing else."""
    seen: list[SFTConfig] = []
    monkeypatch.setattr(sft, "run_sft", seen.append)
    return seen


def raising(error: BaseException):
    def run(config: SFTConfig) -> None:
        raise error

    return run


def test_config_reaches_the_loop(runs):
    assert main([*DEMO, "--max-steps", "7", "--output-dir", "outputs/never"]) == 0
    assert (runs[0].max_steps, runs[0].output_dir) == (7, "outputs/never")


def test_dry_run_prints_what_loads_back_equal_and_stops(runs, capsys, tmp_path):
    assert main([*DEMO, "--optim.type", "adamw", "--dry-run"]) == 0
    assert runs == []
    printed = capsys.readouterr().out
    assert printed.startswith("# note: optim.type changes from 'muon' to 'adamw'")
    (tmp_path / "printed.toml").write_text(printed)
    again, _ = load_config(SFTConfig, ["@", str(tmp_path / "printed.toml")])
    assert tomllib.loads(printed)["optim"]["type"] == again.optim.type == "adamw"


def test_users_error_is_one_message_and_status_2(runs, capsys):
    assert main([*DEMO, "--optim.ns-steps", "0"]) == 2
    out, err = capsys.readouterr()
    assert (out, runs) == ("", [])
    assert err.startswith("error: optim.ns_steps=0: must be an integer, at least 1")
    assert "Traceback" not in err
    assert err.count("\n") == 1


def test_users_error_of_the_run_has_status_2(monkeypatch, capsys):
    monkeypatch.setattr(sft, "run_sft", raising(UserError("data.source.path='x': line 3 is bad")))
    assert main(DEMO) == 2
    assert capsys.readouterr().err == "error: data.source.path='x': line 3 is bad\n"


def test_failure_of_the_run_is_raised(monkeypatch):
    monkeypatch.setattr(sft, "run_sft", raising(RuntimeError("disk full")))
    with pytest.raises(RuntimeError, match="disk full"):
        main(DEMO)


@pytest.mark.parametrize(("signum", "status"), [(15, 143), (2, 130)])
def test_interrupted_run_ends_with_the_signals_status(monkeypatch, signum, status):
    monkeypatch.setattr(sft, "run_sft", raising(Interrupted(signum)))
    assert main(DEMO) == status


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["sftt"], "'sftt': no such command; commands are sft, rl"),
        (["plan"], "plan: say for which command"),
        (["plan", "export"], "plan: say for which command"),
        (["export", "a"], "export takes two folders, CHECKPOINT and OUT, 1 given"),
        (["export", "a", "b", "--dtyp", "x"], "--dtyp: no such option; options here are --dtype"),
        (["export", "a", "b", "--dtype"], "--dtype: no value given"),
        (["export", "a", "b", "--max-shard-gib", "-1"], "--max-shard-gib -1: must be a number"),
        (["export", "a", "b", "--max-shard-gib", "nan"], "--max-shard-gib nan: must be a number"),
        (["export", "nowhere", "b"], "checkpoint=nowhere is no complete checkpoint"),
        (["sft"], "output_dir: required and not given"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refused_words(args, part, capsys):
    assert main(args) == 2
    assert part in capsys.readouterr().err


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"], ["export", "--help"]])
def test_help(args, capsys):
    assert main(args) == 0
    assert capsys.readouterr().out.startswith("usage: trainer ")


def test_help_of_a_command_names_every_field(capsys):
    assert main(["sft", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--optim.ns-steps: an integer, at least 1; default 5" in text
    assert "[optim] type = 'muon' (default):" in text
    assert "--model.architecture.num-experts: an integer, at least 1; required" in text
    assert "Packs a step, over all ranks." in text


@pytest.mark.parametrize("args", [["--help"], ["sft", "--help"]])
def test_help_answers_within_a_second(args):
    command = [sys.executable, "-m", "trainer", *args]
    subprocess.run(command, capture_output=True, check=True)
    before = os.times().children_user
    subprocess.run(command, capture_output=True, check=True)
    # Processor time, so that a busy machine does not decide.
    assert os.times().children_user - before < 1.0


def test_entry_point_exits_with_the_status(tmp_path):
    command = [str(Path(sys.executable).parent / "trainer"), *DEMO, "--seed", "x"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("error: seed='x'")


def test_malformed_launcher_environment_is_a_users_error(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "one")
    assert main([*DEMO, "--dry-run"]) == 2
    assert "RANK='one' in the environment" in capsys.readouterr().err


def test_only_rank_0_prints_a_dry_run(monkeypatch, capsys):
    for name, value in [("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")]:
        monkeypatch.setenv(name, value)
    assert main([*DEMO, "--dry-run"]) == 0
    assert capsys.readouterr().out == ""


def run_with_output(args: list[str], output: int) -> tuple[int, str]:
    command = [sys.executable, "-m", "trainer", *args]
    run = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True)
    return run.returncode, run.stderr


@pytest.mark.parametrize("args", [["sft", "--help"], [*DEMO, "--dry-run"]], ids=" ".join)
def test_a_reader_that_left_ends_the_command_without_a_word(args):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert run_with_output(args, writer) == (141, "")
    finally:
        os.close(writer)


@pytest.mark.parametrize("args", [["--help"], ["sft", "--help"]], ids=" ".join)
def test_output_that_cannot_be_written_is_one_message(args):
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        status, err = run_with_output(args, full)
    finally:
        os.close(full)
    assert status == 1
    assert err == "error: standard output cannot be written: [Errno 28] No space left on device\n"


@pytest.mark.parametrize(("signum", "status"), [(15, 143), (2, 130)])
def test_a_signal_before_training_ends_the_process_at_once(tmp_path, signum, status):
    fifo = tmp_path / "rows.toml"
    os.mkfifo(fifo)  # the command waits for what is never written
    command = [sys.executable, "-m", "trainer", "sft", "@", str(fifo)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    writer = os.open(fifo, os.O_WRONLY)  # returns once the command reads
    process.send_signal(signum)
    assert process.communicate(timeout=60)[1] == ""
    os.close(writer)
    assert process.returncode == status


@pytest.mark.parametrize("flag", ["--dry-run", "--dry_run"])
def test_a_dry_run_takes_either_spelling(runs, capsys, flag):
    assert main([*DEMO, flag]) == 0
    assert runs == []
