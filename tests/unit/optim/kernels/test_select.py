from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.unit.optim.kernels.machines import CUDA, H200, fake_machine
from trainer.errors import UserError
from trainer.optim.kernels import (
    assumed_machine,
    choose_kernel,
    launch_counts,
    quack_default,
    reset_launch_counts,
    symmetric,
)
from trainer.optim.kernels.machine import Machine
from trainer.optim.newton_schulz import newton_schulz

CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def choose(request, shape, dtype, machine, device=CUDA):
    return choose_kernel(request, shape=shape, dtype=dtype, device=device, machine=machine)


@pytest.mark.parametrize(
    ("shape", "dtype", "machine", "name", "reason"),
    [
        ((16, 1536, 2048), BF16, fake_machine(), "gram", "aspect ratio 1.33 is at least 1.33"),
        ((16, 1536, 2048), FP16, fake_machine(), "symmetric", "aspect ratio 1.33 is too low"),
        ((16, 1536, 2040), BF16, fake_machine(), "symmetric", "aspect ratio 1.33 is too low"),
        ((16, 2048, 768), BF16, fake_machine(), "gram", "aspect ratio 2.67 is at least"),
        ((16, 768, 2048), FP16, fake_machine(), "gram", "aspect ratio 2.67"),
        ((1, 4096, 4096), FP16, fake_machine(), "symmetric", "half the symmetric products"),
        ((16, 1536, 2048), FP32, fake_machine(), "dense", "float32 has no symmetric kernel"),
        ((16, 128, 2048), BF16, fake_machine(), "dense", "under 256"),
        ((16, 1530, 2048), BF16, fake_machine(), "dense", "multiples of 8, found 1530x2048"),
        ((16, 1536, 2048), BF16, fake_machine(capability=(8, 0)), "dense", "Hopper"),
        ((16, 1536, 2048), BF16, fake_machine(capability=None), "dense", "nothing is faster"),
        (
            (16, 1536, 2048),
            BF16,
            fake_machine(error="No module named 'triton'"),
            "dense",
            "No module named 'triton'",
        ),
    ],
    ids=str,
)
def test_auto_chooses_and_says_why(shape, dtype, machine, name, reason):
    choice = choose("auto", shape, dtype, machine)
    assert choice.name == name
    assert reason in choice.reason


def test_auto_on_a_cpu_is_dense_and_asks_for_no_package():
    asked = []
    machine = fake_machine(capability=None, asked=asked)
    assert choose("auto", (2, 512, 512), BF16, machine, CPU).name == "dense"
    assert asked == []


@pytest.mark.parametrize(
    ("shape", "dtype", "machine", "message"),
    [
        ((2, 64, 64), FP32, fake_machine(), "needs float16 or bfloat16, found float32"),
        ((2, 60, 64), BF16, fake_machine(), "multiples of 8, found 60x64"),
        ((2, 64, 64), BF16, fake_machine(capability=(7, 5)), "capability 8 to 12, found 7.5"),
        ((2, 64, 64), BF16, fake_machine(error="no quack"), r"quack-kernels .*found no quack"),
    ],
    ids=["dtype", "alignment", "GPU", "package"],
)
def test_symmetric_asked_for_runs_or_refuses(shape, dtype, machine, message):
    with pytest.raises(UserError, match=message) as caught:
        choose("symmetric", shape, dtype, machine)
    assert 'set optim.kernel="auto"' in str(caught.value)
    assert choose("symmetric", (2, 64, 64), BF16, fake_machine()).name == "symmetric"


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)], ids=str)
@pytest.mark.parametrize("error", [ImportError, OSError, RuntimeError, AttributeError])
def test_every_module_of_quack_is_imported_before_it_is_chosen(capability, error):
    """One that is missing, or broken, is met when the optimizer is built and not in its step."""
    modules = symmetric.MODULES if capability[0] == 9 else quack_default.MODULES

    def machine_without(broken):
        def import_module(name):
            if name == broken:
                raise error("another version's")
            return ModuleType(name)

        return Machine(lambda _: "0.1", import_module, lambda _: capability)

    for module in modules:
        with pytest.raises(UserError, match=r"found another version's \(version: 0\.1\)"):
            choose("symmetric", (2, 512, 512), BF16, machine_without(module))
        assert choose("auto", (2, 512, 512), BF16, machine_without(module)).name == "dense"


def test_the_modules_of_quack_are_all_that_is_imported():
    imported = set()
    for source in Path(symmetric.__file__).parent.glob("*.py"):
        lines = map(str.split, source.read_text().splitlines())
        imported |= {line[1] for line in lines if line[:1] == ["from"] and "quack." in line[1]}
    imported = {name for name in imported if name.startswith("quack.")}
    assert imported == {*symmetric.MODULES, *quack_default.MODULES}


def test_gram_asked_for_takes_quack_where_it_can_and_says_so():
    assert "QuACK" in choose("gram", (2, 64, 128), BF16, fake_machine()).reason
    fp32 = choose("gram", (2, 64, 128), FP32, fake_machine())
    assert (fp32.name, fp32.halves_symmetric) == ("gram", False)
    assert "torch" in fp32.reason


def test_dense_asked_for_is_dense_on_any_machine():
    assert choose("dense", (16, 1536, 2048), BF16, fake_machine()).name == "dense"


def test_an_unknown_name_is_refused():
    with pytest.raises(UserError, match=r'optim\.kernel="fast": not a kernel; give one of auto'):
        choose("fast", (2, 64, 64), BF16, fake_machine())


def test_a_plan_for_another_machine_needs_none_of_its_packages():
    assert choose("auto", (16, 1536, 2048), BF16, assumed_machine(H200)).name == "gram"
    assert choose("auto", (16, 1536, 2048), BF16, assumed_machine(None)).name == "dense"


@pytest.mark.parametrize("kernel", ["dense", "gram"])
def test_the_counter_tells_which_kernel_ran(kernel):
    reset_launch_counts()
    newton_schulz(torch.randn(4, 8), kernel=kernel)
    assert launch_counts()[f"newton_schulz.{kernel}"] == 1
    assert launch_counts()["torch.bmm"] == 5
