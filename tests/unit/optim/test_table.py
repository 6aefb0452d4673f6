from trainer.optim.plan import PlannedGroup, PlanOptions, build_plan
from trainer.optim.spec import ParameterSpec
from trainer.optim.table import routing_table

GROUPS = [
    PlannedGroup(
        "dense",
        "muon",
        (
            ParameterSpec("layers.0.q_proj.weight", (4, 16), "float32"),
            ParameterSpec("layers.11.q_proj.weight", (4, 16), "float32"),
            ParameterSpec("layers.0.k_proj.weight", (4, 4), "float32"),
        ),
    ),
    PlannedGroup("adamw", "adamw", (ParameterSpec("norm.weight", (4,), "float32"),)),
]
PLAN = build_plan(GROUPS, PlanOptions(), lambda shape: ("gram", f"for {shape[1]}x{shape[2]}"))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_each_parameter_has_a_line_with_all_that_is_decided_for_it() -> None:
    header, *lines = routing_table(PLAN).splitlines()
    assert cells(header) == ["parameter", "shape", "algorithm", "lr scale", "layout", "kernel"]
    assert [cells(line) for line in lines] == [
        ["layers.0.q_proj.weight", "4x16", "muon:dense", "0.8", "whole", "gram (for 4x16)"],
        ["layers.11.q_proj.weight", "4x16", "muon:dense", "0.8", "whole", "gram (for 4x16)"],
        ["layers.0.k_proj.weight", "4x4", "muon:dense", "0.4", "whole", "gram (for 4x4)"],
        ["norm.weight", "4", "adamw:adamw", "1", "elementwise"],
    ]


def test_layers_that_differ_in_number_alone_are_one_line() -> None:
    _, *lines = routing_table(PLAN, grouped=True).splitlines()
    assert [cells(line)[0] for line in lines] == [
        "layers.*.q_proj.weight (2)", "layers.*.k_proj.weight", "norm.weight",
    ]  # fmt: skip


def test_columns_line_up() -> None:
    header, *lines = routing_table(PLAN).splitlines()
    at = header.index("algorithm")
    assert all(line[at:].startswith(("muon:", "adamw:")) for line in lines)
