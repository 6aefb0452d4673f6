from pathlib import Path

import pytest

from trainer.saved_steps import abandon_steps


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("step_0", "step_2", "step_10", "step_30.partial", "notes"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_steps_after_the_one_gone_on_from_get_another_name(root: Path) -> None:
    assert abandon_steps(root, 2) == [root / "step_10.abandoned"]
    assert names(root) == ["notes", "step_0", "step_10.abandoned", "step_2", "step_30.partial"]


def test_what_was_left_before_stays(root: Path) -> None:
    (root / "step_10.abandoned").mkdir()
    assert abandon_steps(root, 2) == [root / "step_10.abandoned-2"]
    assert {"step_10.abandoned", "step_10.abandoned-2"} < set(names(root))


def test_nothing_is_left_by_a_resume_from_the_last_step(root: Path) -> None:
    before = names(root)
    assert abandon_steps(root, 10) == []
    assert names(root) == before


def test_a_run_without_saved_steps_leaves_none(tmp_path: Path) -> None:
    assert abandon_steps(tmp_path / "weights", 3) == []
