import pytest
import torch

from tests.unit.optim.kernels.machines import CUDA, Recorder, fake_machine, module_of
from trainer.errors import UserError
from trainer.optim.coefficients import resolve_coefficients
from trainer.optim.kernels import choose_kernel, launch_counts, reset_launch_counts
from trainer.optim.kernels.syrk import is_version_at_least
from trainer.optim.newton_schulz import newton_schulz


def choose_syrk(machine, *, shape=(4, 64, 128), dtype=torch.bfloat16):
    return choose_kernel("syrk", shape=shape, dtype=dtype, device=CUDA, machine=machine)


def module_with(recorder, *, batched):
    names = {"HAS_TRITON_340": True, "tsyrk_ex": recorder.single}
    if batched:
        names["batched_tsyrk_ex"] = recorder.batched
    return module_of(**names)


@pytest.mark.parametrize(
    ("version", "is_enough"),
    [
        ("0.3.1", False),
        ("0.4.0.dev0", True),
        ("0.4.0a0", True),
        ("0.4.0", True),
        ("0.4.0.dev0+g1234", True),
        ("0.5.0a0", True),
        ("0.10.0", True),
        ("0.3.9.post1", False),
        ("not a version", False),
        ("", False),
    ],
)
def test_versions_are_compared_as_pip_compares_them(version, is_enough):
    assert is_version_at_least(version, "0.4.0.dev0") is is_enough


@pytest.mark.parametrize(
    ("version", "batched", "kernel", "calls_a_product"),
    [
        ("0.4.0a0", False, "tsyrk_ex", 4),
        ("0.4.0", False, "tsyrk_ex", 4),
        ("0.5.0a0", False, "tsyrk_ex", 4),
        ("0.5.0a0", True, "batched_tsyrk_ex", 1),
    ],
)
def test_the_coefficients_reach_the_kernel_call(version, batched, kernel, calls_a_product):
    recorder = Recorder()
    machine = fake_machine(version=version, module=module_with(recorder, batched=batched))
    choice = choose_syrk(machine)
    assert choice.name == "syrk"
    reset_launch_counts()
    X_BMN = torch.randn(4, 64, 128).bfloat16()
    result = newton_schulz(X_BMN, steps=3, kernel=choice)

    size = 1 if calls_a_product == 4 else 0
    expected = []
    for _, b, c in resolve_coefficients("quintic", 3):
        expected += [(kernel, (4, 64, 128)[size:], 1.0, 0.0)] * calls_a_product
        expected += [(kernel, (4, 64, 64)[size:], c, b)] * calls_a_product
    assert recorder.calls == expected
    assert launch_counts()[f"emerging_optimizers.{kernel}"] == 2 * 3 * calls_a_product
    dense = newton_schulz(X_BMN, steps=3, kernel="dense")
    # Both round once a product; sums differ in order.
    torch.testing.assert_close(result, dense, atol=2e-2, rtol=0)


def test_one_matrix_takes_the_kernel_for_one_even_where_the_batched_one_exists():
    recorder = Recorder()
    machine = fake_machine(version="0.5.0a0", module=module_with(recorder, batched=True))
    newton_schulz(
        torch.randn(64, 128).bfloat16(), steps=1, kernel=choose_syrk(machine, shape=(1, 64, 128))
    )
    assert [name for name, *_ in recorder.calls] == ["tsyrk_ex"] * 2


def test_a_loop_says_so():
    machine = fake_machine(version="0.4.0", module=module_with(Recorder(), batched=False))
    assert "one matrix after another" in choose_syrk(machine).reason
    machine = fake_machine(version="0.5.0a0", module=module_with(Recorder(), batched=True))
    assert choose_syrk(machine).reason == "asked for"


def old_single(a):
    return a @ a.mT


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"version": None}, r"needs emerging-optimizers >= 0\.4\.0\.dev0, found no such package"),
        ({"version": "0.3.1"}, r"needs emerging-optimizers >= 0\.4\.0\.dev0, found 0\.3\.1"),
        (
            {"version": "0.4.0a0", "module": module_of(HAS_TRITON_340=True)},
            r"tsyrk_ex, found no such kernel in 0\.4\.0a0",
        ),
        (
            {
                "version": "0.4.0a0",
                "module": module_of(HAS_TRITON_340=True, tsyrk_ex=old_single),
            },
            r"needs tsyrk_ex to take alpha and beta, found 0\.4\.0a0 has tsyrk_ex\(a\)",
        ),
        (
            {
                "version": "0.4.0",
                "module": module_of(HAS_TRITON_340=False, tsyrk_ex=Recorder().single),
            },
            r"needs Triton >= 3\.4\.0",
        ),
        ({"version": "0.4.0", "error": "No module named 'absl'"}, r"No module named 'absl'"),
        (
            {
                "version": "0.4.0",
                "module": module_of(HAS_TRITON_340=True, tsyrk_ex=Recorder().single),
                "capability": (8, 6),
            },
            r"needs a GPU of compute capability 8\.0, 9\.0, 10\.0, 10\.3, found 8\.6",
        ),
        (
            {
                "version": "0.4.0",
                "module": module_of(HAS_TRITON_340=True, tsyrk_ex=Recorder().single),
                "capability": None,
            },
            r"found cuda",
        ),
    ],
    ids=[
        "absent",
        "0.3.1",
        "0.4.0a0 without the kernel",
        "0.4.0a0 with an older kernel",
        "old Triton",
        "broken install",
        "unsupported GPU",
        "no GPU",
    ],
)
def test_what_is_missing_is_refused_with_need_found_and_ways_out(settings, message):
    with pytest.raises(UserError, match=message) as caught:
        choose_syrk(fake_machine(**settings))
    text = str(caught.value)
    assert text.startswith('optim.kernel="syrk" cannot run (4 matrices of 64x128, bfloat16)')
    assert "Either install" in text
    assert 'optim.kernel="auto"' in text


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_of_a_dtype_that_it_lacks_the_way_out_names_another(dtype):
    module = module_of(HAS_TRITON_340=True, tsyrk_ex=Recorder().single)
    with pytest.raises(UserError, match=r'Either install .* and set optim\.ns_dtype="bfloat16"'):
        choose_syrk(fake_machine(version="0.5.0a0", module=module), dtype=dtype)


def test_an_older_batched_kernel_without_out_gives_way_to_the_loop():
    recorder = Recorder()
    module = module_of(
        HAS_TRITON_340=True, tsyrk_ex=recorder.single, batched_tsyrk_ex=lambda a, c, alpha, beta: a
    )
    choice = choose_syrk(fake_machine(version="0.5.0a0", module=module))
    assert "one matrix after another" in choice.reason


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((4, 64, 100), torch.bfloat16, "multiples of 8, found 64x100"),
        ((4, 64, 128), torch.float16, "needs optim.ns_dtype=bfloat16, found float16"),
        ((4, 64, 128), torch.float32, "needs optim.ns_dtype=bfloat16, found float32"),
    ],
    ids=["misaligned", "float16", "float32"],
)
def test_shape_and_dtype_are_part_of_the_gate(shape, dtype, message):
    machine = fake_machine(version="0.4.0", module=module_with(Recorder(), batched=False))
    with pytest.raises(UserError, match=message):
        choose_syrk(machine, shape=shape, dtype=dtype)


def test_every_unmet_need_is_in_one_message():
    machine = fake_machine(version="0.3.1", capability=None)
    with pytest.raises(UserError, match=r"compute capability.*bfloat16.*multiples.*0\.3\.1"):
        choose_syrk(machine, shape=(4, 63, 128), dtype=torch.float32)


@pytest.mark.parametrize("request_", ["auto", "dense", "symmetric", "gram"])
def test_the_version_is_never_looked_up_unless_syrk_is_asked_for(request_):
    asked = []
    machine = fake_machine(version="0.5.0a0", asked=asked)
    choose_kernel(request_, shape=(4, 512, 512), dtype=torch.bfloat16, device=CUDA, machine=machine)
    assert not [name for name in asked if "emerging" in name]


def test_on_this_machine_syrk_is_refused_without_a_gpu():
    with pytest.raises(UserError, match=r"found cpu.*found no such package installed"):
        newton_schulz(torch.randn(8, 16).bfloat16(), kernel="syrk")
