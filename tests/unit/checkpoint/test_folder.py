import logging
from pathlib import Path

import pytest

from trainer.checkpoint.folder import (
    expendable,
    list_leftovers,
    list_steps,
    prune,
    recover,
    step_folder,
)


def make_checkpoint(root: Path, step: int, content: str = "") -> Path:
    folder = step_folder(root, step)
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(content)
    (folder / ".metadata").touch()
    return folder


def make_folder(root: Path, name: str) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").touch()
    return folder


def test_steps_are_ordered_by_number(tmp_path: Path):
    for step in (9, 100, 10, 0):
        make_checkpoint(tmp_path, step)
    assert list_steps(tmp_path) == [0, 9, 10, 100]


def test_missing_root_holds_no_steps(tmp_path: Path):
    assert list_steps(tmp_path / "absent") == []
    assert list_leftovers(tmp_path / "absent") == []


@pytest.mark.parametrize(
    "name", ["step_30.partial", "step_30.tmp", "step_30", "step_030", "step_x", "step_-1", "other"]
)
def test_leftover_is_no_step_and_is_named_in_the_log(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
):
    make_checkpoint(tmp_path, 9)
    make_folder(tmp_path, name)
    with caplog.at_level(logging.WARNING):
        recover(tmp_path)
    assert list_steps(tmp_path) == [9]
    assert name in caplog.text


def test_partial_folder_is_no_step_even_when_all_its_files_are_there(tmp_path: Path):
    make_checkpoint(tmp_path, 30).rename(tmp_path / "step_30.partial")
    assert list_steps(tmp_path) == []


def test_interrupted_replacement_is_undone(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    make_checkpoint(tmp_path, 7, "old").rename(tmp_path / "step_7.replaced")
    recover(tmp_path)
    assert list_steps(tmp_path) == [7]
    assert "restored" in caplog.text


def test_replaced_folder_beside_its_successor_stays_a_leftover(tmp_path: Path):
    make_checkpoint(tmp_path, 7, "old").rename(tmp_path / "step_7.replaced")
    make_checkpoint(tmp_path, 7, "new")
    recover(tmp_path)
    assert (tmp_path / "step_7" / "manifest.json").read_text() == "new"
    assert list_leftovers(tmp_path) == [tmp_path / "step_7.replaced"]


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "gone"),
    [
        (None, None, []),
        (None, 20, []),
        (1, None, [10, 20, 30]),
        (2, None, [10, 20]),
        (9, None, []),
        (1, 20, [10, 30]),
        (2, 20, [10]),
    ],
)
def test_last_n_and_every_mth_are_kept(
    keep_last: int | None, keep_every: int | None, gone: list[int]
):
    assert expendable([10, 20, 30, 40], 40, keep_last, keep_every) == gone


def test_the_new_checkpoint_is_kept_beside_newer_ones_of_an_abandoned_branch():
    assert expendable([10, 20, 90], newest=20, keep_last=1, keep_every=None) == [10]


def test_prune_removes_own_leftovers_and_nothing_else(tmp_path: Path):
    for step in (1, 2, 3):
        make_checkpoint(tmp_path, step)
    for name in ("step_2.partial", "step_1.deleted", "step_1.replaced", "notes", "step_4"):
        make_folder(tmp_path, name)
    prune(tmp_path, newest=3, keep_last=1, keep_every=None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step_3", "step_4"]


def test_interrupted_removal_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for step in (1, 2):
        make_checkpoint(tmp_path, step)

    def interrupt(_: Path) -> None:
        raise OSError("stopped here")

    monkeypatch.setattr("trainer.checkpoint.folder.shutil.rmtree", interrupt)
    with pytest.raises(OSError, match="stopped here"):
        prune(tmp_path, newest=2, keep_last=1, keep_every=None)
    assert list_steps(tmp_path) == [2]
