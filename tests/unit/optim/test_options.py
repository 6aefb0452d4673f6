import pytest
import torch

from trainer.errors import UserError
from trainer.optim.options import MuonOptions, check_options, plan_with_kernels
from trainer.optim.plan import PlannedGroup
from trainer.optim.spec import ParameterSpec

CPU = torch.device("cpu")
GROUP = PlannedGroup(
    "experts",
    "muon",
    (
        ParameterSpec("mlp.experts.gate_up_proj", (2, 8, 4), "float32"),
        ParameterSpec("mlp.experts.down_proj", (2, 4, 4), "float32"),
    ),
)


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "impl": ["fast", None],
        "ns_dtype": ["float64", "bf16"],
        "replicate": ["both", True],
        "max_stack_gib": [0, -1.0, float("nan"), float("inf"), "2", None, True],
        "stats_interval": [-1, 1.5, "3", None, True],
        "split_gate_up": ["yes", 1, None],
        "kernel": ["fast", None],
        "ns_steps": [0, 2.5, True],
    }.items(),
    ids=str,
)
def test_options_out_of_range_are_refused_by_field_and_value(field, values) -> None:
    for value in values:
        with pytest.raises(UserError) as error:
            check_options(MuonOptions(**{field: value}))
        assert str(error.value).startswith(f"optim.{field}={value!r}: ")


def test_there_is_a_kernel_for_each_bucket_in_order() -> None:
    plan, kernels = plan_with_kernels([GROUP], MuonOptions(kernel="gram"), CPU)
    assert [bucket.rows for bucket in plan.buckets] == [8, 4]
    assert [kernel.name for kernel in kernels] == [bucket.kernel for bucket in plan.buckets]
    assert [kernel.reason for kernel in kernels] == [b.kernel_reason for b in plan.buckets]


def test_a_split_of_gate_and_up_needs_them() -> None:
    options = MuonOptions(split_gate_up=True)
    plan, _ = plan_with_kernels([GROUP], options, CPU)
    assert [bucket.rows for bucket in plan.buckets] == [4]
    dense = PlannedGroup("dense", "muon", GROUP.parameters[1:])
    in_adamw = PlannedGroup("rest", "adamw", GROUP.parameters[:1])
    with pytest.raises(UserError, match=r"optim\.split_gate_up=true: no parameter is a fused"):
        plan_with_kernels([dense, in_adamw], options, CPU)
