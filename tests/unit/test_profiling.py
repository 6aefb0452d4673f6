import gzip
import json

import pytest
import torch

from tests.support.tiny import write_tiny_run
from trainer.cli.main import main
from trainer.config.run import ProfileConfig
from trainer.errors import UserError
from trainer.profiling import StepProfiler


def losses(folder):
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss/mean"] for line in lines]


def test_the_steps_chosen_are_traced_and_no_number_changes(tmp_path):
    plain, traced = tmp_path / "plain", tmp_path / "traced"
    for folder in (plain, traced):
        folder.mkdir()
    assert main(write_tiny_run(plain)) == 0
    assert main([*write_tiny_run(traced), "--profile.trace-steps", "2"]) == 0
    assert losses(traced) == losses(plain)
    files = [path for path in (traced / "run" / "profile").rglob("*") if path.is_file()]
    assert files == [traced / "run" / "profile" / "step_2" / "trace-rank_0.json.gz"]
    with gzip.open(files[0], "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"step 2", "aten::mm"} <= names
    assert "step 1" not in names
    assert not (plain / "run" / "profile").exists()


def test_memory_snapshots_on_a_cpu_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"profile.memory_steps=\[2\] on a CPU"):
        StepProfiler(ProfileConfig(memory_steps=(2,)), tmp_path, torch.device("cpu"), 0)


def test_a_refused_run_leaves_no_folder(tmp_path, capsys):
    assert main([*write_tiny_run(tmp_path), "--profile.memory-steps", "2"]) == 2
    assert "profile.memory_steps=[2]" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["trace_steps", "memory_steps"])
def test_a_step_beyond_the_run_is_refused(tmp_path, capsys, name):
    assert main([*write_tiny_run(tmp_path), f"--profile.{name}", "1", "3"]) == 2
    assert f"profile.{name}=[1, 3] with max_steps=2" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_snapshot_is_written_and_recording_ends(tmp_path):
    profiler = StepProfiler(ProfileConfig(memory_steps=(1,)), tmp_path, torch.device("cuda"), 3)
    for step in (1, 2):
        with profiler.step(step):
            kept = torch.zeros(1 << 20, device="cuda")
    del kept
    path = tmp_path / "profile" / "step_1" / "memory-rank_3.pickle"
    assert path.stat().st_size > 0
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [path]
