import json
import tomllib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.networks import moe_architecture
from trainer.config.model import DenseArchitecture, ModelConfig, MoEArchitecture
from trainer.config.sft import SFTConfig
from trainer.errors import UserError
from trainer.model.architecture import inline_config, resolve_architecture

CONFIGS = Path(__file__).parents[3] / "configs"

# Billions of weights in the published files (a tied output projection counted once).
PUBLISHED_BILLIONS = {
    "qwen3_0_6b": 0.596049920,
    "qwen3_8b": 8.190735360,
    "qwen3_30b_a3b": 30.532122624,
    "qwen3_235b_a22b": 235.093634560,
}


def test_every_shipped_architecture_is_tested() -> None:
    assert {file.stem for file in (CONFIGS / "models").glob("*")} == set(PUBLISHED_BILLIONS)


@pytest.mark.parametrize("name", PUBLISHED_BILLIONS)
def test_shipped_architectures_have_the_published_size(name: str) -> None:
    fields = tomllib.loads((CONFIGS / "models" / f"{name}.toml").read_text())
    config = ModelConfig.model_validate(fields["model"])
    assert config.architecture is not None
    num_layers = config.architecture.num_hidden_layers
    # Layers are alike: two sizes give the line.
    one, two = (num_parameters(config.architecture, layers) for layers in (1, 2))
    assert (one + (num_layers - 1) * (two - one)) / 1e9 == PUBLISHED_BILLIONS[name]


def test_a_run_of_a_shipped_model_has_its_architecture() -> None:
    shipped, run = (
        tomllib.loads((CONFIGS / kind / "qwen3_30b_a3b.toml").read_text())["model"]
        for kind in ("models", "sft")
    )
    assert run == run | shipped


def num_parameters(architecture: DenseArchitecture, num_layers: int) -> int:
    shorter = architecture.model_copy(update={"num_hidden_layers": num_layers})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(inline_config(shorter))
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_large_run_composes() -> None:
    parts = ["models/qwen3_30b_a3b.toml", "sft/qwen3_30b_a3b.toml"]
    model, run = (tomllib.loads((CONFIGS / part).read_text()) for part in parts)
    run["model"] = model["model"] | run["model"]
    assert SFTConfig.model_validate(run).parallel.ep == 8


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_experts", 8), ("hidden_size", 64), ("rope_theta", 5.0), ("tie_word_embeddings", True)],
)
def test_name_and_inline_shapes_must_agree(tmp_path: Path, field: str, value: object) -> None:
    inline_config(moe_architecture()).save_pretrained(tmp_path)
    same = ModelConfig(name=str(tmp_path), architecture=moe_architecture())
    assert resolve_architecture(same).hidden_size == 32
    other = ModelConfig(name=str(tmp_path), architecture=moe_architecture(**{field: value}))
    with pytest.raises(UserError, match=rf"model\.architecture\.{field}={value!r} but"):
        resolve_architecture(other)


CHANGED = {
    "vocab_size": 65,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 24,
    "max_position_embeddings": 77,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": True,
    "initializer_range": 0.5,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
    "norm_topk_prob": False,
    "decoder_sparse_step": 2,
    "mlp_only_layers": (1,),
}


def test_every_field_of_an_architecture_reaches_transformers() -> None:
    assert CHANGED.keys() | {"type", "rope_theta"} == MoEArchitecture.model_fields.keys()
    before, after = moe_architecture(), inline_config(moe_architecture(**CHANGED))
    for field, value in CHANGED.items():
        assert before.model_dump()[field] != value, f"{field} is not changed by this test"
        found = after.num_experts if field == "num_experts" else after.to_dict()[field]
        assert found == (list(value) if isinstance(value, tuple) else value), field
    rope = inline_config(moe_architecture(rope_theta=5.0)).rope_parameters
    assert rope["rope_theta"] == 5.0


def test_a_mixture_whose_head_dim_is_left_out_has_that_of_transformers(tmp_path: Path) -> None:
    write_config(tmp_path, moe_architecture(head_dim=24), {"head_dim": None})
    config = resolve_architecture(ModelConfig(name=str(tmp_path)))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert config.head_dim == model.model.layers[0].self_attn.head_dim == 32 // 4


def write_config(folder: Path, architecture: DenseArchitecture, changes: dict[str, object]) -> None:
    """Write a config.json with `changes`, which remove a field that they call None."""
    inline_config(architecture).save_pretrained(folder)
    path = folder / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: v for key, v in content.items() if v is not None}))
