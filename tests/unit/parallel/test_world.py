import logging

import pytest
import torch
import torch.distributed as dist

from trainer.config.parallel import ParallelConfig
from trainer.errors import UserError
from trainer.parallel import watchdog
from trainer.parallel.world import (
    close_world,
    init_world,
    open_world,
    use_deterministic_algorithms,
)
from trainer.seat import Seat, read_seat

CPU = ParallelConfig(device="cpu")


@pytest.fixture(autouse=True)
def no_group_left():
    yield
    close_world()
    assert not dist.is_initialized()


def test_one_process_is_a_world_of_one():
    world = init_world(CPU)
    assert (world.rank, world.size, world.local_rank) == (0, 1, 0)
    assert world.device == torch.device("cpu")
    assert dist.get_world_size() == 1


def test_group_that_runs_is_used_as_it_is():
    init_world(CPU)
    group = dist.group.WORLD
    assert init_world(CPU).size == 1
    assert dist.group.WORLD is group


def test_open_world_closes_a_world_of_one_after_a_failure(caplog):
    def fail():
        with open_world(CPU):
            watchdog.set_phase("optimizer")
            raise KeyError("x")

    with caplog.at_level(logging.ERROR), pytest.raises(KeyError):
        fail()
    assert not dist.is_initialized()
    assert "rank 0 is in phase 'optimizer'" in caplog.text


def test_open_world_says_nothing_of_a_users_error(caplog):
    with pytest.raises(UserError), open_world(CPU):
        raise UserError("data.source.path='x': no such file")
    assert "phase" not in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")
def test_gpu_asked_for_and_absent_is_refused():
    with pytest.raises(
        UserError, match=r"parallel.device='cuda': local rank 0 has no GPU, 0 found"
    ):
        init_world(ParallelConfig(device="cuda"))


@pytest.mark.parametrize(("wanted", "enabled"), [(None, True), (True, True), (False, False)])
def test_deterministic_algorithms_are_on_by_default_on_a_cpu(wanted, enabled):
    before = torch.are_deterministic_algorithms_enabled()
    try:
        use_deterministic_algorithms(wanted, torch.device("cpu"))
        assert torch.are_deterministic_algorithms_enabled() == enabled
    finally:
        torch.use_deterministic_algorithms(before)


def test_seat_without_a_launcher_is_the_only_one(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert read_seat() == Seat(0, 1, 0)


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("0", "0")])
def test_seat_outside_the_world_is_refused(monkeypatch, rank, size):
    for name, value in (("RANK", rank), ("WORLD_SIZE", size), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"RANK={rank} and WORLD_SIZE={size}"):
        read_seat()


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_ranks_without_a_place_to_meet_are_refused(monkeypatch, missing):
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"} | address).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with pytest.raises(UserError, match=f"{missing} is not set .* WORLD_SIZE=2"):
        init_world(ParallelConfig(device="cpu"))


def test_seat_with_a_variable_missing_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UserError, match="WORLD_SIZE=''"):
        read_seat()
