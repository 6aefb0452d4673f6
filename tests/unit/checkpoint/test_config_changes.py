import pytest

from tests.support.networks import moe_architecture
from trainer.checkpoint import compare_configs, refusal_message
from trainer.config import RLConfig, SFTConfig
from trainer.config.pretrain import PretrainConfig


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


def pretraining(*sources: dict) -> dict:
    source = {"type": "mix", "sources": sources} if len(sources) > 1 else sources[0]
    base = {
        "output_dir": "out",
        "max_steps": 10,
        "model": {"architecture": moe_architecture().model_dump(), "weights": "random"},
        "data": {"source": source},
    }
    return PretrainConfig.model_validate(base).model_dump(mode="json")


FILES = {"type": "files", "path": "corpus", "max_epochs": 2}
TOKENS = {"type": "tokens", "path": "shards"}


@pytest.mark.parametrize("others", [(), (TOKENS,)], ids=["alone", "in a mix"])
@pytest.mark.parametrize(
    "change",
    [{"path": "moved"}, {"max_epochs": 3}, {"on_bad_row": "skip"}, {"suffixes": [".txt"]}],
    ids=lambda change: next(iter(change)),
)
def test_what_cannot_change_the_order_of_a_source_is_allowed(change: dict, others: tuple):
    before, after = pretraining(FILES, *others), pretraining(FILES | change, *others)
    allowed, refused = compare_configs(before, after)
    field = "data.source.sources.0." if others else "data.source."
    assert ([c.field for c in allowed], refused) == ([field + next(iter(change))], [])


@pytest.mark.parametrize(
    ("saved", "change", "message"),
    [
        (FILES, {"column": "body"}, "sources.0.column: 'text' -> 'body' "),
        (FILES, {"weight": 2.0}, "sources.0.weight: 1.0 -> 2.0 "),
        (FILES, {"block_kib": 1}, "sources.0.block_kib: 256 -> 1 "),
        (FILES | {"on_bad_row": "skip"}, {"on_bad_row": "error"}, "'skip' -> 'error' "),
    ],
)
def test_what_changes_the_order_of_a_source_is_refused_by_name(saved, change, message):
    _, refused = compare_configs(pretraining(saved, TOKENS), pretraining(saved | change, TOKENS))
    assert message in refusal_message(refused)
    assert len(refused) == 1


def test_another_source_in_the_mix_is_refused():
    before, after = pretraining(FILES, TOKENS), pretraining(FILES, TOKENS, TOKENS)
    assert "data.source.sources.2.type: None -> 'tokens'" in refusal_message(
        compare_configs(before, after)[1]
    )


def test_shards_may_be_verified_from_now_on():
    after = pretraining(FILES, TOKENS | {"verify": True})
    assert compare_configs(pretraining(FILES, TOKENS), after)[1] == []


RL_CHANGES = {
    "a reward's weight": ({"rewards": [{"type": "exact_match", "weight": 2.0}]}, None),
    "failing rewards": ({"on_reward_error": "error"}, None),
    "another answer": ({"answer": {"type": "boxed"}}, None),
    "bad rows": ({"on_bad_row": "skip"}, None),
    "another order": ({"shuffle": False}, "env.shuffle: True -> False"),
    "another system turn": ({"system": "be brief"}, "env.system: None -> 'be brief'"),
    "another column": ({"source": {"type": "hub", "name": "x"}}, "env.source.type"),
}


@pytest.mark.parametrize(("change", "message"), RL_CHANGES.values(), ids=RL_CHANGES)
def test_of_an_environment_the_prompts_are_fixed_and_the_rewards_free(change: dict, message: str):
    env = {"source": {"type": "files", "path": "p.jsonl"}, "rewards": [{"type": "exact_match"}]}
    base = {"output_dir": "out", "max_steps": 1, "model": {"name": "weights"}}
    before, after = (
        RLConfig.model_validate(base | {"env": section}).model_dump(mode="json")
        for section in (env, env | change)
    )
    allowed, refused = compare_configs(before, after)
    assert (message in refusal_message(refused)) if message else (allowed and not refused)


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
