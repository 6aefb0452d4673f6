"""What a run leaves, by name and content: others' scripts read it."""

import json
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.tiny import write_tiny_run
from trainer.cli.main import main

METRICS = {
    "step",
    "loss/mean",
    "loss/perplexity",
    "optim/lr",
    "optim/grad_norm",
    "optim/skipped_steps",
    "optim/momentum_ms",
    "optim/newton_schulz_ms",
    "optim/exchange_ms",
    "optim/exchange_exposed_ms",
    "optim/update_ms",
    "progress/num_tokens",
    "progress/trained_tokens",
    "time/step",
    "time/forward_backward",
    "time/optimizer",
    "perf/throughput",
    "perf/mfu",
    "perf/peak_memory",
    "max_vio/mean",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run of four steps that saves at each, keeps the last and every third, and evaluates."""
    folder = tmp_path_factory.mktemp("run")
    flags = (
        "--max-steps 4 --ckpt.interval 1 --ckpt.keep-last 1 --ckpt.keep-every 3 "
        "--ckpt.weights-interval 2 --ckpt.weights-dtype float16 --val.fraction 0.2"
    )
    assert main([*write_tiny_run(folder), *flags.split()]) == 0
    return folder / "run"


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_every_promised_name_is_there_and_nothing_else(folder):
    assert names(folder) == {"config.toml", "metrics.jsonl", "plan.json", "checkpoints", "weights"}


def test_checkpoints_and_weights_follow_their_intervals(folder):
    assert names(folder / "checkpoints") == {"step_3", "step_4"}
    assert names(folder / "weights") == {"step_2", "step_4"}


def test_metrics_have_their_names_in_every_step(folder):
    found = records(folder)
    assert [record["step"] for record in found] == [1, 2, 3, 4]
    for record in found:
        assert record.keys() >= METRICS | {"time/save_ckpt"}
    assert "val/loss" in found[-1]
    tokens = [record["progress/num_tokens"] for record in found]
    assert tokens == sorted(tokens), "counted over the run"
    # One process: all tokens of the step in its time.
    last = found[-1]
    assert last["perf/throughput"] * last["time/step"] == pytest.approx(tokens[-1] - tokens[-2])


def test_weights_load_in_plain_transformers_in_the_dtype_asked_for(folder):
    weights = folder / "weights" / "step_4"
    tensors = load_file(weights / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    model = AutoModelForCausalLM.from_pretrained(weights)
    tokenizer = AutoTokenizer.from_pretrained(weights)
    inputs = tokenizer("hello", return_tensors="pt", add_special_tokens=False)
    assert model(**inputs).logits.isfinite().all()


def test_the_written_config_repeats_the_run_in_a_new_folder(folder, tmp_path):
    again = ["sft", "@", str(folder / "config.toml"), "--output-dir", str(tmp_path / "again")]
    assert main(again) == 0
    for ours, theirs in zip(records(folder), records(tmp_path / "again"), strict=True):
        assert ours["loss/mean"] == theirs["loss/mean"]
    written = tomllib.loads((tmp_path / "again" / "config.toml").read_text())
    assert written == tomllib.loads((folder / "config.toml").read_text()) | {
        "output_dir": str(tmp_path / "again")
    }


def test_a_resume_adds_its_config_and_goes_on_in_the_same_metrics(tmp_path):
    words = write_tiny_run(tmp_path)
    assert main(words) == 0
    first = (tmp_path / "run" / "config.toml").read_text()
    assert main([*words, "--ckpt.resume", "latest", "--max-steps", "3"]) == 0
    assert (tmp_path / "run" / "config.toml").read_text() == first
    resumed = tomllib.loads((tmp_path / "run" / "config.resume-1.toml").read_text())
    assert (resumed["max_steps"], resumed["ckpt"]["resume"]) == (3, "latest")
    assert [record["step"] for record in records(tmp_path / "run")] == [1, 2, 3]


def touched(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.iterdir()}


def test_a_run_writes_nothing_beside_the_weights_it_starts_from(folder, tmp_path):
    source = folder / "weights" / "step_4"
    before = touched(source)
    words = [*write_tiny_run(tmp_path), "--model.name", str(source)]
    assert main([*words, "--model.weights", "pretrained"]) == 0
    assert touched(source) == before
