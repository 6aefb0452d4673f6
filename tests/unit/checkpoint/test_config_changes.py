import pytest

from tests.support.networks import moe_architecture
from trainer.checkpoint import compare_configs, refusal_message
from trainer.config import SFTConfig


def resolved(**sections) -> dict:
    base = {
        "output_dir": "out",
        "max_steps": 10,
        "model": {"architecture": moe_architecture().model_dump(), "weights": "random"},
        "data": {"source": {"type": "files", "path": "rows.jsonl"}},
    }
    for name, value in sections.items():
        base[name] = base.get(name, {}) | value if isinstance(value, dict) else value
    return SFTConfig.model_validate(base).model_dump(mode="json")


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"max_steps": 20}, "max_steps"),
        ({"output_dir": "elsewhere"}, "output_dir"),
        ({"optim": {"type": "muon", "lr": 0.5}}, "optim.lr"),
        ({"optim": {"type": "muon", "impl": "per_matrix"}}, "optim.impl"),
        ({"optim": {"type": "muon", "kernel": "dense"}}, "optim.kernel"),
        ({"optim": {"type": "dion"}}, "optim.type"),
        ({"parallel": {"ep": 2}}, "parallel.ep"),
        ({"data": {"micro_batch_size": 4}}, "data.micro_batch_size"),
        ({"data": {"source": {"type": "files", "path": "moved.jsonl"}}}, "data.source.path"),
        ({"model": {"compute_dtype": "float32"}}, "model.compute_dtype"),
        ({"ckpt": {"interval": 5}}, "ckpt.interval"),
    ],
)
def test_change_that_takes_effect_is_listed(sections: dict, field: str):
    allowed, refused = compare_configs(resolved(), resolved_over(sections))
    assert refused == []
    assert field in [change.field for change in allowed]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"seed": 7}, "seed: 0 -> 7 "),
        ({"optim": {"type": "adamw"}}, "optim.type: 'muon' -> 'adamw' "),
        ({"data": {"seq_len": 64}}, "data.seq_len: 2048 -> 64 "),
        ({"data": {"batch_size": 2}}, "data.batch_size: 8 -> 2 "),
        ({"data": {"shuffle": False}}, "data.shuffle: True -> False "),
        ({"data": {"tokenizer": "x"}}, "data.tokenizer: None -> 'x' "),
        ({"val": {"fraction": 0.5}}, "val.fraction: 0.0 -> 0.5 "),
        (
            {"model": {"architecture": moe_architecture(num_experts=8).model_dump()}},
            "model.architecture.num_experts: 4 -> 8 ",
        ),
    ],
)
def test_change_that_would_break_the_run_is_refused_by_name(sections: dict, message: str):
    _, refused = compare_configs(resolved(), resolved_over(sections))
    assert message in refusal_message(refused)


def test_equal_configs_differ_in_nothing():
    assert compare_configs(resolved(), resolved()) == ([], [])


def resolved_over(sections: dict) -> dict:
    """Return the base config with sections merged over its own."""
    data = {"source": {"type": "files", "path": "rows.jsonl"}} | sections.get("data", {})
    model = {
        "architecture": moe_architecture().model_dump(),
        "weights": "random",
    } | sections.get("model", {})
    return resolved(**(sections | {"data": data, "model": model}))
