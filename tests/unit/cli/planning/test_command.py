import pytest
import torch.distributed as dist

from tests.support.tiny import write_tiny_run
from trainer.cli.main import main


def planned(tmp_path, capsys, *flags: str) -> str:
    _, *words = write_tiny_run(tmp_path)
    assert main(["plan", "sft", *words, *flags]) == 0
    return capsys.readouterr().out


def test_plan_needs_no_ranks(tmp_path, capsys):
    text = planned(tmp_path, capsys, "--world-size", "8", "--parallel.ep", "2")
    assert "over 8 ranks: dp_replicate 1 x dp_shard 8 (dp_shard_mod_ep 4 x ep 2)" in text
    assert not dist.is_initialized()


def test_plan_names_route_kernel_exchange_and_memory(tmp_path, capsys):
    flags = ("--world-size", "4", "--parallel.dp-replicate", "2", "--parallel.ep", "2")
    text = planned(tmp_path, capsys, *flags)
    for part in (
        "model.layers.*.mlp.experts.gate_up_proj",
        "muon:experts",
        "stack split over ep",
        "float32 has no symmetric kernel",
        "peak, optimizer step",
        "the peak of forward and backward is at",
        "fits H200",
        "largest data.micro_batch_size",
        "Newton-Schulz",
        "sent over dp_replicate",
        "time on H200",
    ):
        assert part in text


def test_plan_of_a_named_gpu_takes_its_kernels(tmp_path, capsys):
    shapes = ["--model.architecture.hidden-size", "512", "--optim.ns-dtype", "bfloat16"]
    hopper = planned(tmp_path, capsys, "--gpu", "h200", *shapes)
    ampere = planned(tmp_path, capsys, "--gpu", "a100", *shapes)
    assert "measured on Hopper alone" in ampere
    assert "measured on Hopper alone" not in hopper
    assert "no rates are measured on A100" in ampere


@pytest.mark.parametrize("optim", ["adamw", "sgd", "dion"])
def test_plan_of_other_optimizers(tmp_path, capsys, optim):
    text = planned(tmp_path, capsys, "--optim.type", optim, "--optim.weight-decay", "0")
    assert f"optimizer: {optim}" in text
    assert "peak, forward and backward" in text


def test_more_activations_with_more_packs(tmp_path, capsys):
    def activations(*flags: str) -> float:
        lines = planned(tmp_path, capsys, "--data.seq-len", "2048", *flags).splitlines()
        return float(next(line for line in lines if "activations  " in line).split()[1])

    one, two = activations(), activations("--data.micro-batch-size", "2")
    # Printed to the third place.
    assert two == pytest.approx(2 * one, abs=2e-3)
    assert activations("--model.compute-dtype", "bfloat16") < one


def test_a_world_size_of_the_environment_is_checked_too(tmp_path, capsys, monkeypatch):
    _, *words = write_tiny_run(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "over 2 ranks" in planned(tmp_path, capsys)
    monkeypatch.setenv("WORLD_SIZE", "many")
    assert main(["plan", "sft", *words]) == 2
    assert "WORLD_SIZE many: must be a number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--world-size", "x"], "--world-size x: must be a number of ranks"),
        (["--world-size", "3", "--parallel.dp-replicate", "2"], "parallel.dp_replicate=2"),
        (["--world-size"], "--world-size is given without a value"),
        (["--gpu", "--world-size", "2"], "--gpu is given without a value"),
        (["--gpu", "tpu"], "--gpu tpu: not known; choose one of h200"),
        (["--optim.kernel", "syrk"], 'optim.kernel="syrk"'),
        (["--world-siz", "3"], "world_siz"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_refused(tmp_path, capsys, flags, part):
    _, *words = write_tiny_run(tmp_path)
    assert main(["plan", "sft", *words, *flags]) == 2
    assert part in capsys.readouterr().err


def test_kernels_by_name_are_planned_without_their_packages(tmp_path, capsys):
    # Its rows and columns are multiples of 8, those of four experts' router are not.
    shapes = ["--model.architecture.num-experts", "8", "--optim.ns-dtype", "bfloat16"]
    text = planned(tmp_path, capsys, "--optim.kernel", "syrk", *shapes)
    assert "syrk (asked for)" in text


def test_the_reference_implementation_does_all_work_on_every_rank(tmp_path, capsys):
    def flops(*flags: str) -> float:
        text = planned(tmp_path, capsys, "--model.architecture.hidden-size", "512", *flags)
        line = next(line for line in text.splitlines() if "Newton-Schulz" in line)
        return float(line.split()[1])

    reference = flops("--optim.impl", "per_matrix", "--world-size", "4")
    assert reference == flops("--world-size", "1")
    assert reference > 2 * flops("--world-size", "4")
