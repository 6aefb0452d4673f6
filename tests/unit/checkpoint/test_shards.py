from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from trainer.checkpoint.safe_load import read_index, read_tensor
from trainer.checkpoint.shards import LocalShard, describe_failure, read_shards, write_shards
from trainer.parallel.boxes import Box


def shard(local: torch.Tensor, shape: tuple[int, ...], offsets: tuple[int, ...]) -> LocalShard:
    return LocalShard(local, torch.Size(shape), Box(offsets, tuple(local.shape)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_whole_tensor_round_trips_in_its_dtype(tmp_path: Path, mesh: DeviceMesh, dtype):
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    write_shards(tmp_path, {"a": LocalShard.of(tensor)}, None)
    room = torch.zeros_like(tensor)
    read_shards(tmp_path, read_index(tmp_path), {"a": LocalShard.of(room)}, None)
    assert torch.equal(room, tensor)


def test_any_box_is_read_from_a_whole_tensor(tmp_path: Path, mesh: DeviceMesh):
    whole = torch.arange(24.0).reshape(4, 6)
    write_shards(tmp_path, {"a": LocalShard.of(whole), "b": LocalShard.of(whole)}, None)
    inner, empty = torch.zeros(2, 3), torch.zeros(0, 6)
    shards = {"a": shard(inner, (4, 6), (1, 2)), "b": shard(empty, (4, 6), (4, 0))}
    read_shards(tmp_path, read_index(tmp_path), shards, None)
    assert torch.equal(inner, whole[1:3, 2:5])


def test_view_of_a_larger_tensor_is_written_alone(tmp_path: Path, mesh: DeviceMesh):
    large = torch.zeros(1000, 1000)
    write_shards(tmp_path, {"a": LocalShard.of(large[3])}, None)
    assert sum(path.stat().st_size for path in tmp_path.glob("*.distcp")) < 10_000


def test_loading_writes_into_the_live_parameter(tmp_path: Path, mesh: DeviceMesh):
    flat = mesh["ep"]
    live = DTensor.from_local(torch.zeros(4, requires_grad=True), flat, [Shard(0)])
    write_shards(tmp_path, {"a": LocalShard.of(torch.arange(4.0))}, None)
    read_shards(tmp_path, read_index(tmp_path), {"a": LocalShard.of(live)}, None)
    assert live.to_local().tolist() == [0, 1, 2, 3]


def test_host_copy_is_independent_of_the_live_tensor():
    live = torch.ones(3)
    copy = LocalShard.of(live).copy_to_host()
    live.zero_()
    assert copy.local.tolist() == [1, 1, 1]


def test_scalar_and_vector_stay_apart(tmp_path: Path, mesh: DeviceMesh):
    tensors = {"scalar": torch.tensor(2.0), "vector": torch.tensor([2.0])}
    write_shards(tmp_path, {name: LocalShard.of(t) for name, t in tensors.items()}, None)
    index = read_index(tmp_path)
    assert {name: read_tensor(tmp_path, index, name).shape for name in tensors} == {
        "scalar": torch.Size([]),
        "vector": torch.Size([1]),
    }


def test_failure_is_described_with_its_ranks(tmp_path: Path, mesh: DeviceMesh):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointException) as raised:
        write_shards(tmp_path / "file", {"a": LocalShard.of(torch.ones(2))}, None)
    assert describe_failure(raised.value).startswith("rank 0: [Errno 17] File exists")
    assert describe_failure(OSError("disk full")) == "rank 0: disk full"
