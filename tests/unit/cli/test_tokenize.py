import json

import pytest

from tests.support.texts import texts, write_jsonl_texts
from trainer.cli.main import main


def test_text_becomes_shards_that_a_run_accepts(tmp_path, capsys):
    write_jsonl_texts(tmp_path / "a.jsonl", texts(10))
    words = [str(tmp_path / "a.jsonl"), str(tmp_path / "out"), "--workers", "1"]
    assert main(["tokenize", *words]) == 0
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["num_documents"] == 10
    assert "10 documents" in capsys.readouterr().out
    assert main(["tokenize", *words]) == 0
    assert "1 of 1 shards are there already" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a"], "tokenize takes a source and a folder, SRC and DST, 1 given"),
        (["a", "b", "--workers", "0"], "--workers 0: must be an integer of at least 1"),
        (["a", "b", "--shard-mib", "x"], "--shard-mib x: must be an integer of at least 1"),
        (["a", "b", "--on-bad-row", "x"], "--on-bad-row x: must be error or skip"),
        (["a", "b", "--worker", "1"], "--worker: no such option"),
        (["", "b"], "SRC='' names no source"),
        (["hub:", "b"], "SRC='hub:' names no source"),
        (["a", "b", "--suffixes", ","], "--suffixes ',': names no suffix"),
        (["nowhere", "b"], "SRC='nowhere' does not exist"),
        (["nowhere", "b", "--tokenizer", "no/thing"], "--tokenizer='no/thing' is neither a local"),
    ],
)
def test_what_is_wrong_is_named(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # The library reads its environment when it is imported, which another test may have done.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["tokenize", *words]) == 2
    assert message in capsys.readouterr().err


def test_help_lists_the_options(capsys):
    assert main(["tokenize", "--help"]) == 0
    assert "--shard-mib" in capsys.readouterr().out
