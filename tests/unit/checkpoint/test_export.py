import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.support.meshes import one_rank_mesh
from tests.support.networks import moe_architecture, random_model
from trainer.checkpoint import CheckpointStore
from trainer.checkpoint import export as export_module
from trainer.checkpoint.export import export_checkpoint
from trainer.config.optim import AdamWConfig
from trainer.data import build_byte_tokenizer
from trainer.errors import UserError
from trainer.model import setup_model
from trainer.model.export import save_hf_weights
from trainer.model.hf_files import GIB
from trainer.optim import setup_optimizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a checkpoint and the weights that training wrote beside it."""
    root = tmp_path_factory.mktemp("run")
    with one_rank_mesh() as mesh:
        model = setup_model(random_model(moe_architecture(tie_word_embeddings=True)), mesh)
        optimizer = setup_optimizer(AdamWConfig(), model.named_parameters(), mesh)
        tokenizer = build_byte_tokenizer()
        store = CheckpointStore(root / "checkpoints", tokenizer=tokenizer)
        store.save(3, model, optimizer, {})
        save_hf_weights(model, tokenizer, root / "weights", "bfloat16")
    return root


@pytest.mark.parametrize("max_shard_gib", [1.0, 3e4 / GIB], ids=["one-file", "many-files"])
def test_export_equals_the_weights_written_in_training(
    saved: Path, tmp_path: Path, max_shard_gib: float
):
    assert not dist.is_initialized(), "export needs no ranks"
    out = tmp_path / "new" / "out"
    export_checkpoint(saved / "checkpoints" / "step_3", out, "bfloat16", max_shard_gib)
    tensors = {k: v for path in out.glob("*.safetensors") for k, v in load_file(path).items()}
    expected = load_file(saved / "weights" / "model.safetensors")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (out / name).read_text() == (saved / "weights" / name).read_text()


def test_export_never_reads_the_optimizer(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    names: list[str] = []
    read = export_module.read_tensor

    def record(folder, index, name):
        names.append(name)
        return read(folder, index, name)

    monkeypatch.setattr(export_module, "read_tensor", record)
    export_checkpoint(saved / "checkpoints" / "step_3", tmp_path / "out")
    assert names
    assert all(name.startswith("model.") for name in names)


def test_folder_that_holds_something_is_refused(saved: Path, tmp_path: Path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match="exists and is not an empty folder"):
        export_checkpoint(saved / "checkpoints" / "step_3", tmp_path)


def test_a_folder_in_the_checkpoint_is_refused(saved: Path):
    checkpoint = saved / "checkpoints" / "step_3"
    before = sorted(checkpoint.rglob("*"))
    with pytest.raises(UserError, match=r"out='.*' .* \(it lies in the checkpoint"):
        export_checkpoint(checkpoint, checkpoint / "a" / "out")
    assert sorted(checkpoint.rglob("*")) == before


@pytest.mark.parametrize("place", ["file/out", "/proc/out", "x" * 300, "a\0b"])
def test_a_place_that_can_hold_no_folder_is_refused(saved: Path, tmp_path: Path, place: str):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"out='.*' cannot be written .*: choose another"):
        export_checkpoint(saved / "checkpoints" / "step_3", tmp_path / place)


def test_a_damaged_checkpoint_is_refused_and_leaves_nothing(saved: Path, tmp_path: Path):
    checkpoint = tmp_path / "step_3"
    shutil.copytree(saved / "checkpoints" / "step_3", checkpoint)
    path = next(checkpoint.glob("*.distcp"))
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(UserError, match=r"step_3 is damaged: the checksums of model\."):
        export_checkpoint(checkpoint, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [checkpoint]


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/step_4"])
def test_what_is_no_checkpoint_says_what_to_type(saved: Path, tmp_path: Path, place: str):
    with pytest.raises(UserError, match=r"^checkpoint='.*: give '.*/checkpoints/step_3'"):
        export_checkpoint(saved / place, tmp_path / "out")


def test_a_folder_that_is_nothing_of_a_run_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"is no complete checkpoint: give a folder"):
        export_checkpoint(tmp_path, tmp_path / "out")


def test_unknown_dtype_is_refused(saved: Path, tmp_path: Path):
    with pytest.raises(UserError, match="dtype='int8'"):
        export_checkpoint(saved / "checkpoints" / "step_3", tmp_path / "out", "int8")


def test_failure_leaves_nothing_behind(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(_: Path) -> None:
        raise OSError("Read-only file system")

    monkeypatch.setattr(export_module, "publish", fail)
    with pytest.raises(RuntimeError, match=r"weights were not written to .*Read-only"):
        export_checkpoint(saved / "checkpoints" / "step_3", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_home_folder_may_be_abbreviated(saved: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(saved.parent))
    named = Path("~") / saved.name / "checkpoints" / "step_3"
    export_checkpoint(named, tmp_path / "out", "bfloat16")
    assert (tmp_path / "out" / "config.json").is_file()
