import json
import multiprocessing

import pytest

from trainer.data import build_byte_tokenizer
from trainer.data.shards.folder import PLAN, begin, locked
from trainer.errors import UserError


def hold(folder, held, release):
    """Hold a folder until told to let go."""
    with locked(folder):
        held.set()
        release.wait(60)


def test_a_folder_is_written_by_one_command_at_a_time(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    held, release = spawn.Event(), spawn.Event()
    other = spawn.Process(target=hold, args=(tmp_path, held, release))
    other.start()
    assert held.wait(60)
    with pytest.raises(UserError, match=r"DST='.*' is being written by another"), locked(tmp_path):
        pass
    other.kill()
    other.join()
    with locked(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        rule = r"DST='.*' cannot be written \(.*\): make room .* or give another"
        with pytest.raises(UserError, match=rule), locked(path):
            pass


@pytest.mark.parametrize("left", [[], ["plan.json.partial"], ["plan.json", "tokenizer.partial"]])
def test_a_folder_is_begun_again_wherever_the_first_command_was_killed(tmp_path, left):
    plan = {"source": {"files": 1}}
    if "plan.json" in left:
        (tmp_path / PLAN).write_text(json.dumps(plan))
        (tmp_path / "tokenizer.partial").mkdir()
    for name in left:
        if not (tmp_path / name).exists():
            (tmp_path / name).write_text('{"sour')
    with locked(tmp_path):
        begin(tmp_path, plan, build_byte_tokenizer())
    assert json.loads((tmp_path / PLAN).read_text()) == plan
    assert (tmp_path / "tokenizer" / "tokenizer_config.json").exists()


@pytest.mark.parametrize("kind", [OSError, Exception])
def test_a_tokenizer_that_cannot_be_saved_is_told_in_words(tmp_path, monkeypatch, kind):
    tokenizer = build_byte_tokenizer()

    def fail(folder):
        folder.mkdir(exist_ok=True)
        raise kind("No space left on device (os error 28)")

    monkeypatch.setattr(tokenizer, "save_pretrained", fail)
    with pytest.raises(
        UserError, match=r"DST='.*' cannot be written \((tokenizer: )?No space left"
    ):
        begin(tmp_path, {"tokenizer": "a"}, tokenizer)
    monkeypatch.undo()
    begin(tmp_path, {"tokenizer": "a"}, tokenizer)
    assert (tmp_path / "tokenizer" / "tokenizer.json").exists()


@pytest.mark.parametrize("content", [b"{", b"\xff"])
def test_a_damaged_plan_is_refused(tmp_path, content):
    (tmp_path / PLAN).write_bytes(content)
    with pytest.raises(UserError, match=r"plan\.json is damaged \(.*empty this one"):
        begin(tmp_path, {"tokenizer": "a"}, build_byte_tokenizer())


def test_another_plan_is_refused_by_what_differs(tmp_path):
    tokenizer = build_byte_tokenizer()
    begin(tmp_path, {"tokenizer": "a", "size of shards": 3}, tokenizer)
    begin(tmp_path, {"tokenizer": "a", "size of shards": 3}, tokenizer)
    with pytest.raises(UserError, match=r"another size of shards \(3, now 4\): give another"):
        begin(tmp_path, {"tokenizer": "a", "size of shards": 4}, tokenizer)
