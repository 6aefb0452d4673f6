"""A run starts from another run's checkpoint as from its exported weights, bit for bit."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.rl_configs import rl_config
from tests.support.spawn import run_ranks
from tests.support.tiny import write_tiny_run

pytestmark = pytest.mark.distributed

OWN_NETWORK = ["--model.weights", "pretrained", "--model.architecture", "None"]


def first_run(folder: str) -> None:
    """Three steps on two ranks, expert-parallel; a checkpoint and an export of step 2."""
    sft(folder, "first", "--max-steps", "3", "--ckpt.interval", "2", "--parallel.ep", "2")


def starts(folder: str, name: str, ep: int) -> list[str]:
    """Start runs from the checkpoint and from its export; return refusals of what is no start."""
    from trainer.config import RLConfig
    from trainer.errors import UserError
    from trainer.loops.rl import run_rl

    root = Path(folder)
    checkpoint = root / "first" / "checkpoints" / "step_2"
    for kind, start in {"checkpoint": checkpoint, "export": root / "exported"}.items():
        flags = ["--model.name", str(start), "--parallel.ep", str(ep), *OWN_NETWORK]
        sft(folder, f"{name}-{kind}", "--max-steps", "1", *flags)
    table = rl_config(root / f"{name}-rl", max_steps=1, loss={"kl_coef": 0.1}).model_dump()
    table["model"] = {"name": str(checkpoint), "compute_dtype": "float32"}
    run_rl(RLConfig.model_validate(table))
    other_shape = ["--model.weights", "pretrained", "--model.architecture.hidden-size", "64"]
    messages = []
    for start, flags in (
        (root / "first", OWN_NETWORK),
        (root / "damaged", OWN_NETWORK),
        (checkpoint, other_shape),
        (checkpoint, []),
    ):
        with pytest.raises(UserError) as caught:
            sft(folder, "refused", "--model.name", str(start), *flags)
        messages.append(str(caught.value))
    return messages


def sft(folder: str, name: str, *flags: str) -> None:
    from trainer.config import SFTConfig, load_config
    from trainer.loops.sft import run_sft
    from trainer.parallel import world

    # One process group serves all runs of this process.
    world.close_world = lambda: None
    words = ["@", f"{folder}/config.toml", "--output-dir", f"{folder}/{name}"]
    config, _ = load_config(SFTConfig, [*words, "--ckpt.weights-dtype", "float32", *flags])
    run_sft(config)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    from trainer.checkpoint.export import export_checkpoint

    folder = tmp_path_factory.mktemp("starts")
    write_tiny_run(folder)
    run_ranks(2, first_run, str(folder))
    checkpoint = folder / "first" / "checkpoints" / "step_2"
    export_checkpoint(checkpoint, folder / "exported", "float32")
    shutil.copytree(checkpoint, folder / "damaged")
    shard = next((folder / "damaged").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-100])
    messages = run_ranks(2, starts, str(folder), "two", 2)[0]
    run_ranks(1, starts, str(folder), "one", 1)
    return folder, messages


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "weights" / "step_1" / "model.safetensors")


@pytest.mark.parametrize("ranks", ["one", "two"])
def test_a_checkpoint_is_its_export(outcome, ranks: str):
    folder, _ = outcome
    lines = []
    for kind in ("checkpoint", "export"):
        (line,) = (folder / f"{ranks}-{kind}" / "metrics.jsonl").read_text().splitlines()
        lines.append(json.loads(line))
    for name in ("step", "loss/mean", "optim/grad_norm", "progress/num_tokens"):
        assert lines[0][name] == lines[1][name]
    from_checkpoint, from_export = (
        weights(folder / f"{ranks}-{kind}") for kind in ("checkpoint", "export")
    )
    assert from_checkpoint.keys() == from_export.keys()
    for name, tensor in from_checkpoint.items():
        assert torch.equal(tensor, from_export[name]), name


def test_it_is_the_weights_of_that_step_and_nothing_else(outcome):
    folder, _ = outcome
    first = [json.loads(s) for s in (folder / "first" / "metrics.jsonl").read_text().splitlines()]
    (line,) = (folder / "one-checkpoint" / "metrics.jsonl").read_text().splitlines()
    # The first batch again, on weights that have learnt; counters begin anew.
    assert json.loads(line)["progress/num_tokens"] == first[0]["progress/num_tokens"]
    assert json.loads(line)["loss/mean"] < first[0]["loss/mean"]


def test_the_reference_of_rl_is_the_same_start(outcome):
    folder, _ = outcome
    for ranks in ("one", "two"):
        (line,) = (folder / f"{ranks}-rl" / "metrics.jsonl").read_text().splitlines()
        assert json.loads(line)["reference_kl/mean"] == 0.0


def test_what_is_no_start_is_refused_on_every_rank(outcome):
    run_folder, damaged, other_shape, unread = outcome[1]
    assert "first' is the folder of a run: give" in run_folder
    assert "checkpoints/step_3' (or step_2)" in run_folder
    assert "damaged is damaged: " in damaged
    assert "model.architecture.hidden_size=64" in other_shape
    assert "has 32" in other_shape
    assert "model.weights='random' while model.name=" in unread
