from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.meshes import one_rank_mesh
from tests.support.networks import moe_architecture, random_model
from tests.support.unseen import unseen
from trainer.checkpoint import CheckpointStore
from trainer.config import SFTConfig, load_config
from trainer.errors import UserError
from trainer.loops.run_folder import held_output_dir, origin_of, resolve_resume, write_config


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    with one_rank_mesh():
        yield CheckpointStore(tmp_path / "run" / "checkpoints")


def config(folder: Path, resume: object = None) -> SFTConfig:
    return SFTConfig.model_validate(
        dict(
            output_dir=str(folder / "run"),
            max_steps=3,
            model=random_model(moe_architecture()),
            data={"source": {"type": "files", "path": "rows.jsonl"}},
            ckpt={"resume": resume},
        )
    )


@pytest.mark.parametrize(
    "name", ["file", "file/run", "/dev/full", "/proc/run", "x" * 300, "run"], ids=lambda n: n[:9]
)
def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("")
    message = rf"output_dir='.*{name[:9]}.*': a run cannot write there"
    with pytest.raises(UserError, match=message), held_output_dir(str(tmp_path / name)):
        pass


def test_a_folder_that_this_user_may_not_see_is_refused_before_data_are_read(
    tmp_path: Path,
) -> None:
    message = r"output_dir='.*/closed/run': a run cannot write there \(.*Permission denied"
    with unseen(tmp_path / "closed"), pytest.raises(UserError, match=message):
        origin_of(config(tmp_path / "closed"))


def test_two_runs_are_kept_apart(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    message = rf"output_dir='{folder}': another run is writing there; wait"
    refused = pytest.raises(UserError, match=message)
    with held_output_dir(folder), refused, held_output_dir(folder):
        pass
    with held_output_dir(folder):
        pass


def test_a_new_folder_starts_fresh(tmp_path: Path, store: CheckpointStore) -> None:
    assert resolve_resume(config(tmp_path), store) is None


@pytest.mark.parametrize("trace", ["config.toml", "metrics.jsonl", "checkpoints", "weights"])
def test_a_folder_that_holds_another_run_is_refused(
    tmp_path: Path, store: CheckpointStore, trace: str
) -> None:
    (tmp_path / "run" / trace).mkdir(parents=True)
    with pytest.raises(UserError, match=rf"output_dir='.*/run' holds another run \({trace}\)"):
        resolve_resume(config(tmp_path), store)


def test_latest_without_a_checkpoint_starts_fresh_and_says_so(
    tmp_path: Path, store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    assert resolve_resume(config(tmp_path, "latest"), store) is None
    assert "starting fresh" in caplog.text


def test_a_step_asked_for_and_not_there_is_refused(tmp_path: Path, store: CheckpointStore) -> None:
    step = resolve_resume(config(tmp_path, 3), store)
    assert step == 3
    with pytest.raises(UserError, match=r"ckpt\.resume=3: .* no complete checkpoint"):
        store.read_progress(step)


def test_each_launch_writes_its_config_under_a_name_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    written = [write_config(config(tmp_path, "latest"), resumed=n > 0) for n in range(3)]
    names = [path.name for path in written]
    assert names == ["config.toml", "config.resume-1.toml", "config.resume-2.toml"]
    assert load_config(SFTConfig, ["@", str(written[0])])[0] == config(tmp_path, "latest")
