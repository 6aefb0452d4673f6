import json
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.checkpoint.manifest import (
    Manifest,
    OptimizerRecord,
    check_files,
    file_sizes,
    read_manifest,
    write_manifest,
)
from trainer.errors import UserError

MANIFEST = Manifest(
    step=3,
    world_size=2,
    num_threads=1,
    torch="2.13.0",
    architecture={"hidden_size": 8},
    optimizer=OptimizerRecord("AdamW", [{"names": ["w"], "settings": {"lr": 0.1}}]),
    progress={"tokens": 2**60, "lr": 0.1 + 0.2},
    files={},
)


def test_round_trip_is_exact(tmp_path: Path):
    write_manifest(tmp_path, MANIFEST)
    assert read_manifest(tmp_path) == MANIFEST


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_number_is_not_written(tmp_path: Path, value: float):
    with pytest.raises(ValueError, match="Out of range"):
        write_manifest(tmp_path, replace(MANIFEST, progress={"loss": value}))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1}'])
def test_damaged_manifest_is_refused(tmp_path: Path, text: str):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"manifest.json is missing or damaged"):
        read_manifest(tmp_path)


def test_missing_manifest_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"manifest.json is missing or damaged"):
        read_manifest(tmp_path)


def test_another_format_is_refused(tmp_path: Path):
    write_manifest(tmp_path, MANIFEST)
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(UserError, match="format 99, this version reads format 1"):
        read_manifest(tmp_path)


def test_truncated_or_missing_file_is_named(tmp_path: Path):
    (tmp_path / "inner").mkdir()
    for name in ("a", "inner/b", "c"):
        (tmp_path / name).write_text("1234")
    manifest = replace(MANIFEST, files=file_sizes(tmp_path))
    check_files(tmp_path, manifest)
    (tmp_path / "inner" / "b").write_text("12")
    (tmp_path / "c").unlink()
    with pytest.raises(UserError, match=r"c \(no bytes of 4\), inner/b \(2 bytes of 4\)"):
        check_files(tmp_path, manifest)
