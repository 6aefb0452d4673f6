import os
from pathlib import Path

import pytest

from trainer.config import PretrainConfig, SFTConfig, load_config
from trainer.config.base import path_in_full
from trainer.errors import UserError

ROOT = Path(__file__).parents[3]
SFT = ["@", str(ROOT / "configs/sft/demo.toml")]
PRETRAIN = ["@", str(ROOT / "configs/pretrain/demo.toml")]


def test_a_tilde_is_the_home_folder_wherever_a_path_stands(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/someone")
    words = [
        *("--output-dir=~/run", "--model.name=~", "--data.tokenizer=~/model"),
        *("--data.chat-template=~/a.jinja", "--data.source.type", "files"),
        *("--data.source.path=~/rows.jsonl", "--val.source.type", "files"),
        "--val.source.path=./~/rows.jsonl",
    ]
    config = load_config(SFTConfig, [*SFT, *words])[0].model_dump()
    assert config["output_dir"] == "/home/someone/run"
    assert config["model"]["name"] == "/home/someone"
    assert config["data"]["tokenizer"] == "/home/someone/model"
    assert config["data"]["chat_template"] == "/home/someone/a.jinja"
    assert config["data"]["source"]["path"] == "/home/someone/rows.jsonl"
    assert config["val"]["source"]["path"] == "./~/rows.jsonl"
    text = [*PRETRAIN, "--data.source.type", "tokens", "--data.source.path=~/shards"]
    config = load_config(PretrainConfig, text)[0].model_dump()
    assert config["data"]["source"]["path"] == "/home/someone/shards"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("~nobody-here/x", r"'~nobody-here/x' begins with the home of a user .* or './~nobody"),
        ("a/" + "x" * 256, "is too long for a path: a name takes 255 bytes"),
        ("é" * 128, "is too long for a path"),
        ("x/" * 2048, "is too long for a path: .* all of it 4095"),
    ],
    ids=["user", "name", "bytes", "whole"],
)
def test_a_path_that_no_file_can_have_is_refused_by_its_field(path: str, message: str):
    for flag in ("--output-dir", "--model.name", "--data.tokenizer"):
        field = flag[2:].replace("-", "_")
        with pytest.raises(UserError, match=rf"^{field}: .*{message}"):
            load_config(SFTConfig, [*SFT, f"{flag}={path}"])


@pytest.mark.parametrize("path", ["Qwen/Qwen3-8B", "x" * 255, "a/~/b", "./~x", "é" * 127, "a\n b"])
def test_other_paths_stay_as_they_are(path: str):
    assert path_in_full(path) == path


def test_the_longest_name_can_be_made(tmp_path: Path):
    (tmp_path / path_in_full("x" * 255)).touch()
    with pytest.raises(OSError, match="too long"):
        os.stat(tmp_path / ("x" * 256))
