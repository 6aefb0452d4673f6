import errno
import os
from pathlib import Path

import pytest

from trainer import durable
from trainer.durable import LOCK, beside, hold, publish, restore_replaced, start_folder


def test_folder_has_its_name_only_once_published(tmp_path: Path):
    final = tmp_path / "runs" / "out"
    (start_folder(final) / "a").write_text("new")
    assert not final.exists()
    publish(final)
    assert (final / "a").read_text() == "new"
    assert not beside(final).exists()


def test_start_drops_what_an_interrupted_write_left(tmp_path: Path):
    (start_folder(tmp_path / "out") / "old").touch()
    assert list(start_folder(tmp_path / "out").iterdir()) == []


def test_publish_replaces_a_folder_of_the_same_name(tmp_path: Path):
    for content in ("old", "new"):
        (start_folder(tmp_path / "out") / "a").write_text(content)
        publish(tmp_path / "out")
    assert (tmp_path / "out" / "a").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_everything_is_flushed_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    flushed: list[str] = []
    monkeypatch.setattr(durable, "sync_path", lambda path: flushed.append(path.name))
    final = tmp_path / "out"
    partial = start_folder(final)
    (partial / "inner").mkdir()
    (partial / "inner" / "a").touch()
    rename = Path.rename
    monkeypatch.setattr(
        Path, "rename", lambda path, to: (flushed.append("renamed"), rename(path, to))[1]
    )
    publish(final)
    before = flushed[: flushed.index("renamed")]
    assert sorted(before) == ["a", "inner", "out.partial"]
    assert flushed[flushed.index("renamed") + 1 :][0] == tmp_path.name


@pytest.mark.parametrize("stop_at", range(2), ids=["first-rename", "second-rename"])
def test_replacing_leaves_one_whole_folder_wherever_it_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
):
    final = tmp_path / "out"
    for content in ("old", "new"):
        (start_folder(final) / "a").write_text(content)
        if content == "old":
            publish(final)
    renames = iter(range(9))
    rename = Path.rename

    def stop(path: Path, to: Path) -> Path:
        if next(renames) == stop_at:
            raise OSError("stopped here")
        return rename(path, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", stop)
        with pytest.raises(OSError, match="stopped here"):
            publish(final)
    assert restore_replaced(final) is (stop_at == 1)
    assert (final / "a").read_text() == "old"


def test_sync_reaches_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    descriptors: list[int] = []
    monkeypatch.setattr(os, "fsync", descriptors.append)
    durable.sync_path(tmp_path)
    assert len(descriptors) == 1


def test_a_folder_is_held_by_one_at_a_time_and_left_as_it_was(tmp_path: Path):
    folder = tmp_path / "runs" / "run"
    with hold(folder):
        (folder / "a").touch()
        with pytest.raises(BlockingIOError), hold(folder):
            pass
    assert [path.name for path in folder.iterdir()] == ["a"]
    with hold(folder):
        pass


def test_a_folder_that_nothing_came_into_goes_again(tmp_path: Path):
    with pytest.raises(ZeroDivisionError), hold(tmp_path / "run"):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_of_the_users_stays(tmp_path: Path):
    with hold(tmp_path):
        pass
    assert tmp_path.is_dir()


def test_a_lock_that_cannot_be_removed_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(ZeroDivisionError), hold(tmp_path):
        raise ZeroDivisionError


def test_a_lock_that_a_killed_process_left_holds_nobody_up(tmp_path: Path):
    (tmp_path / LOCK).touch()
    with hold(tmp_path):
        pass


def test_a_lock_that_goes_while_it_is_taken_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(durable.fcntl, "flock", lambda *_: (tmp_path / LOCK).unlink())
    with pytest.raises(BlockingIOError), hold(tmp_path):
        pass


def test_a_file_system_without_locks_is_named_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(durable.fcntl, "flock", refuse)
    with hold(tmp_path):
        pass
    assert "cannot be locked ([Errno 37] No locks available)" in caplog.text
