"""What a user can get wrong ends in one message and status 2, before or in the midst of a run."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny import row, write_tiny_run
from trainer.cli.main import main


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run, expect status 2 and one message without traceback; return it."""
    capsys.readouterr()
    status = main(words)
    message = capsys.readouterr().err
    assert status == 2, message
    assert message.count("error: ") == 1
    assert "Traceback" not in message
    return message


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A folder with the tiny run, trained, in `run`."""
    folder = tmp_path_factory.mktemp("finished")
    assert main(write_tiny_run(folder)) == 0
    return folder


@pytest.fixture
def pretrained(finished, tmp_path) -> tuple[Path, list[str]]:
    """A copy of the finished run's weights to spoil, and words that train from it."""
    folder = tmp_path / "weights"
    folder.mkdir()
    for file in (finished / "run" / "weights" / "step_2").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    words = write_tiny_run(tmp_path)
    return folder, [*words, "--model.name", str(folder), "--model.weights", "pretrained"]


def spoil(folder: Path, change) -> None:
    """Rewrite the single weights file after `change(tensors)`."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_the_tiny_run_itself_is_fine(finished):
    assert len((finished / "run" / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--optim.ns-stps", "3"], ["optim.ns_stps=3", "unknown key", "optim.ns_steps"]),
        (["--parallel.ep", "3"], ["parallel.ep=3", "num_experts=4"]),
        (["--optim.lr", "nan"], ["optim.lr=nan", "finite"]),
        (["--data.source.path", "nowhere"], ["data.source.path='nowhere'"]),
        (["--model.name", "./nowhere"], ["model.name='./nowhere'"]),
        (["--parallel.dp-shard", "3"], ["parallel.dp_shard=3", "1 were started"]),
        (["--optim.kernel", "syrk"], ["optim.kernel=", "syrk"]),
        (["--data.chat-template", "nowhere.jinja"], ["data.chat_template=", "nowhere.jinja"]),
    ],
    ids=lambda value: value[0] if value[0].startswith("--") else "",
)
def test_config(flags, parts, tmp_path, capsys):
    message = refused([*write_tiny_run(tmp_path), *flags], capsys)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        ([], ["rows.jsonl"]),
        ([json.dumps(row()), '{"messages": ['], ["rows.jsonl", "2"]),
        ([json.dumps(row()), "[1, 2]"], ["rows.jsonl", "2"]),
        (
            [json.dumps({"messages": [{"role": "user", "content": "hello"}]})],
            ["rows.jsonl", "assistant"],
        ),
        ([json.dumps({"text": "hello"})], ["rows.jsonl", "messages"]),
        ([json.dumps(row(answer="long " * 200))], ["data.overlong", "drop", "truncate"]),
    ],
    ids=["empty", "half a line", "no object", "no assistant turn", "no messages", "overlong"],
)
def test_rows(lines, parts, tmp_path, capsys):
    message = refused(write_tiny_run(tmp_path, lines), capsys)
    assert all(part in message for part in parts), message


def test_output_folder_of_another_run(finished, tmp_path, capsys):
    words = [*write_tiny_run(tmp_path), "--output-dir", str(finished / "run")]
    message = refused(words, capsys)
    assert f"output_dir='{finished / 'run'}'" in message
    assert "ckpt.resume" in message


def test_weights_that_fit_are_taken(pretrained):
    _, words = pretrained
    assert main(words) == 0


def drop_norm(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def add_bias(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.bias"] = torch.zeros(32)


def narrow_norm(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.zeros(31)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (drop_norm, ["model.norm.weight"]),
        (add_bias, ["model.norm.bias"]),
        (narrow_norm, ["model.norm.weight", "31", "32"]),
    ],
    ids=["missing", "extra", "misshaped"],
)
def test_tensors_of_a_weights_file(change, parts, pretrained, capsys):
    folder, words = pretrained
    spoil(folder, change)
    message = refused(words, capsys)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("kept", [0.5, 0.0], ids=["half-written", "of no bytes"])
def test_weights_file(kept, pretrained, capsys):
    folder, words = pretrained
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    assert "model.safetensors" in refused(words, capsys)


def test_folder_without_weights(pretrained, capsys):
    folder, words = pretrained
    (folder / "model.safetensors").unlink()
    assert str(folder) in refused(words, capsys)
