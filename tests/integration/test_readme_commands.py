"""Every command of the README runs, in its order, shortened."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.meshes import one_rank_mesh
from tests.support.rows import write_jsonl
from tests.support.tiny import row
from trainer.cli.main import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

ON_CPU = "--parallel.device cpu --wandb.enabled false"
SMALL = (
    "--max-steps 1 --model.architecture.num-hidden-layers 1 --model.architecture.hidden-size 32 "
    "--data.seq-len 128 --data.batch-size 2 --data.micro-batch-size 1 --val.max-packs 1 "
    f"--val.max-new-tokens 2 {ON_CPU}"
)
SHORTER = {
    "trainer sft @ configs": SMALL,
    "trainer sft @ outputs": f"--max-steps 3 {ON_CPU}",
    "trainer pretrain": SMALL,
    "trainer rl": "--max-steps 1 --rollout.num-prompts 2 --rollout.num-samples 2 "
    f"--rollout.max-new-tokens 4 --rollout.batch-size 4 --val.num-prompts 2 {ON_CPU}",
    "trainer plan": "",
    "trainer tokenize": "--workers 1",
    "trainer export": "",
}
"""What makes a command short, by its first words."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    text = "".join(blocks("bash")).replace("\\\n", " ")
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return [" ".join(line.split()) for line in lines if line]


def of_kind(start: str) -> list[str]:
    return [command for command in commands() if command.startswith(start)]


def test_every_command_is_of_a_kind_that_is_tested():
    kinds = ("make ", "trainer ", "torchrun ")
    assert sum(len(of_kind(kind)) for kind in kinds) == len(commands()) > 8


@pytest.mark.parametrize("command", of_kind("make "))
def test_make_has_the_target(command):
    run = subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("command", of_kind("torchrun "))
def test_a_launcher_starts_it(command, tmp_path):
    words = re.sub(r"--nproc-per-node \d+", "--nproc-per-node 1", command).split()
    launcher = [sys.executable, "-m", "torch.distributed.run", *words[1:], "--dry-run"]
    run = subprocess.run(launcher, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "name = " in run.stdout


def test_the_trainer_runs_every_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.symlink(ROOT / "configs", "configs")
    write_jsonl(tmp_path / "my.jsonl", [row(f"hello {i}") for i in range(40)])
    (tmp_path / "my_corpus").mkdir()
    for number in range(40):
        (tmp_path / "my_corpus" / f"{number}.txt").write_text(f"def f{number}():\n    pass\n" * 9)
    # The run that the README goes on from.
    ends = "--max-steps 2 --ckpt.interval 1 --val.num-generate 2"
    assert main(f"sft @ configs/sft/demo.toml {SMALL} {ends}".split()) == 0
    for command in of_kind("trainer "):
        more = next(text for start, text in SHORTER.items() if command.startswith(start))
        command = command.replace("step_250", "step_2").replace("step_125", "step_1")
        assert main([*shlex.split(command)[1:], *more.split()]) == 0, command
    assert (tmp_path / "outputs/demo-half-way/model.safetensors").exists()
    assert (tmp_path / "outputs/demo/config.resume-1.toml").exists()


def test_the_optimizer_is_used_as_shown():
    import torch

    (code,) = blocks("python")
    with one_rank_mesh() as mesh:
        names = {"model": torch.nn.Linear(4, 4), "mesh": mesh}
        exec(code, names)
        names["model"](torch.ones(1, 4)).sum().backward()
        before = names["model"].weight.detach().clone()
        names["optimizer"].step()
        assert not torch.equal(names["model"].weight, before)
