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


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"format": 1}', b"null", b"\xff\xfe", b"1" * 5000]
)
def test_damaged_manifest_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "manifest.json").write_bytes(content)
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


def test_an_edited_manifest_is_refused(tmp_path: Path):
    write_manifest(tmp_path, MANIFEST)
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace('"step": 3', '"step": 4'))
    with pytest.raises(UserError, match="its checksum does not agree"):
        read_manifest(tmp_path)


def test_a_manifest_of_before_checksums_is_read(tmp_path: Path):
    write_manifest(tmp_path, MANIFEST)
    path = tmp_path / "manifest.json"
    content = json.loads(path.read_text())
    del content["checksum"], content["checksums"]
    path.write_text(json.dumps(content))
    assert read_manifest(tmp_path) == MANIFEST


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
