"""A name is told for what it is; a folder of a run that is no start says what to type."""

from pathlib import Path

import pytest

from tests.support.unseen import unseen
from trainer.errors import UserError
from trainer.origin import companions, find_checkpoint


def make_checkpoint(folder: Path) -> Path:
    (folder / "hf").mkdir(parents=True)
    for name in ("manifest.json", ".metadata", "hf/config.json"):
        (folder / name).touch()
    return folder


def make_weights(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    for step in (9, 10):
        make_checkpoint(folder / "checkpoints" / f"step_{step}")
    (folder / "checkpoints" / "step_11.partial").mkdir()
    unfinished = make_checkpoint(folder / "checkpoints" / "step_12")
    (unfinished / "manifest.json").unlink()
    make_weights(folder / "weights" / "step_10")
    return folder


def test_a_checkpoint_is_found_with_its_companions(run: Path):
    checkpoint = run / "checkpoints" / "step_9"
    assert find_checkpoint(str(checkpoint)) == checkpoint
    assert companions(str(checkpoint)) == str(checkpoint / "hf")


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "nowhere/at/all", "./nowhere", ".", "/"])
def test_other_names_are_left_to_those_who_read_them(name: str):
    assert find_checkpoint(name) is None
    assert companions(name) == name


def test_folders_in_hugging_face_layout_are_no_checkpoints(run: Path):
    assert find_checkpoint(str(run / "weights" / "step_10")) is None


LATEST = r"give '.*/checkpoints/step_10' \(or step_9\)"
REFUSALS = {
    "": rf"run' is the folder of a run: {LATEST}",
    "checkpoints": rf"checkpoints' holds several steps of a run: {LATEST}",
    "weights": r"weights' holds several steps of a run: give '.*/weights/step_10'$",
    "checkpoints/step_8": rf"step_8' is not there: {LATEST}",
    "checkpoints/latest": rf"latest' is not there: {LATEST}",
    "checkpoints/step_11.partial": rf"step_11.partial' is no complete checkpoint .*{LATEST}",
    "checkpoints/step_12": rf"step_12' is no complete checkpoint .*{LATEST}",
    "checkpoints/step_9/hf": r"hf' is the config of a checkpoint, .*: give '.*/step_9'$",
    "weights/step_9": r"step_9' is not there: give '.*/weights/step_10'$",
}


@pytest.mark.parametrize(("place", "message"), REFUSALS.items(), ids=REFUSALS)
def test_what_is_no_start_says_what_to_type(run: Path, place: str, message: str):
    with pytest.raises(UserError, match=rf"^model\.name='.*{message}"):
        find_checkpoint(str(run / place))


def test_a_run_that_saved_nothing_says_so(tmp_path: Path):
    (tmp_path / "checkpoints" / "step_1.partial").mkdir(parents=True)
    with pytest.raises(UserError, match="no step of that run was saved whole"):
        find_checkpoint(str(tmp_path))


@pytest.mark.parametrize("look", [find_checkpoint, companions])
def test_a_place_that_this_user_may_not_see_is_named(tmp_path: Path, look):
    name = str(tmp_path / "closed" / "model")
    message = rf"model\.name='{name}' cannot be looked at \(Permission denied\): make it readable"
    with unseen(tmp_path / "closed"), pytest.raises(UserError, match=message):
        look(name)
