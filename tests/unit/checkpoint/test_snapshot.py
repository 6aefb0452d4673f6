import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.support.networks import moe_architecture, random_model
from trainer.checkpoint.shards import LocalShard
from trainer.checkpoint.snapshot import capture, copy_to_host
from trainer.config.optim import AdamWConfig
from trainer.model import setup_model
from trainer.optim import setup_optimizer
from trainer.parallel.agreement import Ranks


@pytest.fixture
def run(mesh: DeviceMesh):
    model = setup_model(random_model(moe_architecture()), mesh)
    return model, setup_optimizer(AdamWConfig(), model.named_parameters(), mesh)


def test_capture_shares_memory_and_a_host_copy_does_not(run):
    model, optimizer = run
    live = capture(1, model, optimizer, {}, Ranks())
    copied = copy_to_host(live, Ranks())
    with torch.no_grad():
        model.get_parameter("model.norm.weight").to_local().fill_(5)
    key = "model.model.norm.weight"
    assert live.shards[key].local[0] == 5
    assert copied.shards[key].local[0] != 5


def test_progress_is_taken_as_it_is_now(run):
    progress = {"data": {"epoch": 1}}
    snapshot = capture(1, *run, progress, Ranks())
    progress["data"]["epoch"] = 2
    assert snapshot.progress == {"data": {"epoch": 1}}


def test_no_room_for_a_copy_is_a_failure_in_words(run, monkeypatch: pytest.MonkeyPatch):
    snapshot = capture(1, *run, {}, Ranks())

    def fail(_: LocalShard) -> LocalShard:
        raise MemoryError("12 GiB")

    monkeypatch.setattr(LocalShard, "copy_to_host", fail)
    with pytest.raises(RuntimeError, match="no room for a copy on the host: 12 GiB"):
        copy_to_host(snapshot, Ranks())
