import json

import pytest

from tests.support.launch import launch_ranks
from tests.support.tiny import row, write_tiny_run

pytestmark = pytest.mark.distributed

PROLOGUE = """
import os, sys, time, logging
logging.basicConfig()
import torch, torch.distributed as dist
from trainer.config.parallel import ParallelConfig
from trainer.parallel.signals import StopSignal
from trainer.parallel.watchdog import set_phase
from trainer.parallel.world import open_world
rank = int(os.environ["RANK"])
"""

MAIN = """
import os, sys
from trainer.__main__ import main
on_rank_1 = "1" if os.environ["RANK"] == "0" else "x"
sys.argv[1:] = [word.replace("ON_RANK_1", on_rank_1) for word in sys.argv[1:]]
sys.exit(main())
"""

DEMO = ["sft", "@", "configs/sft/demo.toml", "--output-dir", "outputs/never"]


def test_error_that_all_ranks_have_is_said_once():
    first, second = launch_ranks(2, MAIN, *DEMO, "--max-steps", "0")
    assert (first.status, second.status) == (2, 2)
    assert first.err.startswith("error: max_steps=0: must be an integer, at least 1")
    assert second.err == ""


def test_error_that_only_another_rank_has_is_said_and_stops_all():
    first, second = launch_ranks(2, MAIN, *DEMO, "--parallel.device", "cpu", "--seed", "ON_RANK_1")
    assert (first.status, second.status) == (2, 2)
    said = [ended.err for ended in (first, second) if "error: seed='x'" in ended.err]
    assert len(said) == 1


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_device_that_only_one_rank_lacks_stops_all(lacking):
    code = PROLOGUE + (
        "import sys\n"
        "from trainer.errors import UserError\n"
        f"torch.cuda.device_count = lambda: 0 if rank == {lacking} else 2\n"
        "torch.cuda.set_device = lambda device: None\n"
        "try:\n"
        "    with open_world(ParallelConfig(device='cuda')): pass\n"
        "except UserError as error:\n"
        "    print(error)\n"
        "    sys.exit(2)\n"
    )
    for ended in launch_ranks(2, code):
        assert ended.status == 2, ended.err
        assert f"parallel.device='cuda': local rank {lacking} has no GPU, 0 found" in ended.out


def test_data_that_only_one_rank_lacks_stops_all_with_its_name(tmp_path):
    words = write_tiny_run(tmp_path)
    (tmp_path / "rows.jsonl").rename(tmp_path / "1.jsonl")
    path = f"{tmp_path}/ON_RANK_1.jsonl"
    first, second = launch_ranks(2, MAIN, *words, "--data.source.path", path)
    assert (first.status, second.status) == (2, 2)
    assert "error: rank 1: data.source.path=" in first.err
    assert "x.jsonl' does not exist" in first.err
    assert "error: " not in second.err


def test_a_row_that_only_one_rank_lacks_in_mid_run_is_the_only_message_and_loses_no_step(tmp_path):
    lines = [json.dumps(row(f"hello {index}")) for index in range(300)]
    words = write_tiny_run(tmp_path, lines)
    (tmp_path / "rows.jsonl").rename(tmp_path / "1.jsonl")
    (tmp_path / "x.jsonl").write_text("\n".join([*lines[:250], "{", *lines[251:]]))
    words += ["--data.source.path", f"{tmp_path}/ON_RANK_1.jsonl", "--data.shuffle", "false"]
    first, second = launch_ranks(2, MAIN, *words, "--max-steps", "99")
    assert (first.status, second.status) == (2, 2)
    assert f"error: rank 1: {tmp_path}/x.jsonl:251: the line is not JSON" in first.err
    assert "Traceback" not in first.err + second.err
    assert "error: " not in second.err
    step = (tmp_path / "run" / "metrics.jsonl").read_text().count("\n")
    assert f"the state after step {step} is saved" in first.err
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step_{step}"]


def test_collective_that_outlasts_the_timeout_names_the_rank_that_hangs_and_its_phase():
    code = PROLOGUE + (
        "with open_world(ParallelConfig(device='cpu', timeout_s=4)):\n"
        "    set_phase('data')\n"
        "    if rank == 1: time.sleep(60)\n"
        "    set_phase('forward_backward')\n"
        "    dist.all_reduce(torch.ones(1))\n"
    )
    first, second = launch_ranks(2, code)
    assert (first.status, second.status) == (1, 1)
    assert "rank 0 is in phase 'forward_backward'" in first.err
    assert "it waits for rank 1, last seen in phase 'data'" in first.err
    assert "hang: rank 1 is in phase 'data'" in second.err
    assert "parallel.timeout_s=4" in second.err


@pytest.mark.parametrize(("dying", "has_launcher"), [(1, True), (0, True), (0, False)])
def test_rank_that_dies_takes_the_others_down_at_once(dying, has_launcher):
    code = PROLOGUE + (
        "with open_world(ParallelConfig(device='cpu')):\n"
        "    set_phase('optimizer')\n"
        "    dist.all_reduce(torch.ones(1))\n"
        f"    if rank == {dying}: os._exit(9)\n"
        "    dist.all_reduce(torch.ones(1))\n"
    )
    ends = launch_ranks(2, code, has_launcher=has_launcher)
    other = ends[1 - dying]
    assert (ends[dying].status, other.status) == (9, 1)
    assert f"failed: rank {1 - dying} is in phase 'optimizer'" in other.err
    assert "Traceback" in other.err


def test_signal_to_one_rank_stops_all_after_the_same_step():
    code = PROLOGUE + (
        "import signal\n"
        "with open_world(ParallelConfig(device='cpu')), StopSignal(has_launcher=True) as stop:\n"
        "    for step in range(1000):\n"
        "        if rank == 1 and step == 3: os.kill(os.getpid(), signal.SIGTERM)\n"
        "        time.sleep(0.01)\n"
        "        if (signum := stop.agreed()) is not None: break\n"
        "    print(step, signum)\n"
    )
    first, second = launch_ranks(2, code)
    assert first.out == second.out
    assert first.out.split()[1] == "15"
