import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from trainer.checkpoint.safe_load import read_index, read_tensor
from trainer.errors import UserError


class Planted:
    """Creates a file when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self):
        return os.mkdir, (str(self.witness),)


def rewrite(folder: Path, change) -> None:
    """Change the pickled index of a checkpoint."""
    index = pickle.loads((folder / ".metadata").read_bytes())
    change(index)
    (folder / ".metadata").write_bytes(pickle.dumps(index))


@pytest.fixture
def folder(tmp_path: Path, mesh: DeviceMesh) -> Path:
    tensors = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.tensor(3, dtype=torch.int64),
        "c": torch.ones(2, dtype=torch.bfloat16),
    }
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(tmp_path / "checkpoint"))
    return tmp_path / "checkpoint"


def test_plain_tensors_are_read_one_by_one(folder: Path):
    index = read_index(folder)
    assert torch.equal(read_tensor(folder, index, "a"), torch.arange(6.0).reshape(2, 3))
    assert read_tensor(folder, index, "b").item() == 3
    assert read_tensor(folder, index, "c").dtype == torch.bfloat16


def test_sharded_tensors_with_strided_placements_are_read(tmp_path: Path, mesh: DeviceMesh):
    placements = [Replicate(), _StridedShard(0, split_factor=1), Shard(0)]
    tensor = DTensor.from_local(torch.arange(4.0), mesh, placements, run_check=False)
    dcp.save({"a": tensor}, storage_writer=dcp.FileSystemWriter(tmp_path / "checkpoint"))
    index = read_index(tmp_path / "checkpoint")
    assert torch.equal(read_tensor(tmp_path / "checkpoint", index, "a"), torch.arange(4.0))


def test_members_of_enums_are_read_as_older_python_pickles_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """Before 3.11.4 an enum's member is pickled as `getattr(its class, its name)`."""
    member = _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT
    kind = type(member)
    monkeypatch.setattr(
        kind, "__reduce_ex__", lambda self, _: (getattr, (kind, self.name)), raising=False
    )

    def touch(index: Metadata) -> None:
        index.planner_data = {"format": member}

    rewrite(folder, touch)
    assert b"getattr" in (folder / ".metadata").read_bytes()
    index = read_index(folder)
    assert index.planner_data == {"format": member}
    assert torch.equal(read_tensor(folder, index, "a"), torch.arange(6.0).reshape(2, 3))


class _Reaching:
    """Pickled, it asks for an attribute of a class that an index may hold."""

    def __init__(self, *steps: object) -> None:
        self._steps = steps

    def __reduce__(self):
        return getattr, self._steps


@pytest.mark.parametrize(
    "steps",
    [
        (Metadata, "__init__"),
        (type(_MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT), "__class__"),
        (type(_MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT), "mro"),
        (torch.Size([1]), "numel"),
    ],
    ids=lambda steps: steps[1],
)
def test_no_other_attribute_is_reached(folder: Path, steps: tuple[object, str]):
    (folder / ".metadata").write_bytes(pickle.dumps(_Reaching(*steps)))
    with pytest.raises(UserError, match=r"it names builtins\.getattr of something else"):
        read_index(folder)


def test_pickle_planted_as_index_does_not_run(folder: Path, tmp_path: Path):
    witness = tmp_path / "ran"
    (folder / ".metadata").write_bytes(pickle.dumps(Planted(witness)))
    with pytest.raises(UserError, match=r"\.metadata is not read: it names posix\.mkdir"):
        read_index(folder)
    assert not witness.exists()
    pickle.loads((folder / ".metadata").read_bytes())
    assert witness.exists(), "the planted pickle is a live one"


def test_pickle_planted_inside_the_index_does_not_run(folder: Path, tmp_path: Path):
    witness = tmp_path / "ran"

    def plant(index: Metadata) -> None:
        index.planner_data = Planted(witness)

    rewrite(folder, plant)
    with pytest.raises(UserError, match=r"it names posix\.mkdir"):
        read_index(folder)
    assert not witness.exists()


@pytest.mark.parametrize(
    "payload",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"\x80\x04\x8c\x05torch\x8c\x04load\x93.",
        b"\x80\x04\x8c\x05torch\x8c\x0eserialization.\x93.",
        b"ctorch._utils\n_rebuild_tensor_v2\n.",
    ],
    ids=["eval", "torch.load", "dotted", "rebuild"],
)
def test_index_may_name_nothing_but_its_own_classes(folder: Path, payload: bytes):
    (folder / ".metadata").write_bytes(payload)
    with pytest.raises(UserError, match="which no index of tensors needs"):
        read_index(folder)


def test_entry_of_pickled_bytes_is_refused_by_name(tmp_path: Path, mesh: DeviceMesh):
    folder = tmp_path / "checkpoint"
    state = {"a": torch.zeros(2), "extra": {"note": "text"}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))
    with pytest.raises(UserError, match=r"entry 'extra\.note' is pickled bytes, not a tensor"):
        read_index(folder)


@pytest.mark.parametrize("name", ["../secret", "/etc/hosts", "inner/file"])
def test_index_may_not_point_outside_its_folder(folder: Path, name: str):
    def redirect(index: Metadata) -> None:
        next(iter(index.storage_data.values())).relative_path = name

    rewrite(folder, redirect)
    with pytest.raises(UserError, match="not a plain file of the checkpoint's folder"):
        read_index(folder)


@pytest.mark.parametrize("content", [b"", b"\x80", b"not a pickle", pickle.dumps([1, 2])])
def test_damaged_index_is_refused(folder: Path, content: bytes):
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(UserError, match=r"\.metadata"):
        read_index(folder)


def test_missing_index_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"\.metadata is not read"):
        read_index(tmp_path)
