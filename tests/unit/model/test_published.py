import json
from pathlib import Path

import pytest

from tests.support.networks import dense_architecture, moe_architecture
from trainer.config.model import DenseArchitecture, ModelConfig
from trainer.errors import UserError
from trainer.model.architecture import inline_config, resolve_architecture

DENSE, MOE = dense_architecture(), moe_architecture()


def rope(**parameters: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_theta": 1e4} | parameters}


REFUSED = [
    (MOE, {"hidden_act": "gelu"}, r"hidden_act='gelu': experts compute silu"),
    (DENSE, {"hidden_act": "SiLU"}, r"hidden_act='SiLU': transformers has no such function"),
    (MOE, {"hidden_size": "x"}, r"no readable config.json .*hidden_size"),
    (MOE, {"hidden_size": -1}, r"hidden_size=-1"),
    (MOE, {"num_attention_heads": 0}, r"num_attention_heads=0"),
    (MOE, {"num_experts_per_tok": 9}, r"num_experts_per_tok=9 exceeds num_experts=4"),
    (MOE, {"head_dim": 15}, r"head_dim"),
    (DENSE, {"use_sliding_window": True}, r"use_sliding_window=true: sliding windows are not"),
    (MOE, {"use_sliding_window": True}, r"use_sliding_window=true: sliding windows are not"),
    (DENSE, {"layer_types": ["full_attention", "sliding_attention"]}, r"'sliding_attention': a"),
    (
        DENSE,
        {"layer_types": ["full_attention"]},
        r"\(2\) .* `layer_types` \(1\)",
    ),
    (DENSE, {"attention_dropout": 0.1}, r"attention_dropout=0.1: .* set it to 0"),
    (MOE, {"attention_dropout": 1}, r"attention_dropout=1: .* set it to 0"),
    (DENSE, {"is_causal": False}, r"is_causal=false: a token would be trained to predict what"),
    (MOE, {"is_causal": False}, r"is_causal=false"),
    (DENSE, {"pad_token_id": 64}, r"pad_token_id=64 with vocab_size=64: it must be an id below"),
    (MOE, {"pad_token_id": -65}, r"pad_token_id=-65 with vocab_size=64"),
    (DENSE, {"quantization_config": {"quant_method": "fp8"}}, r"quant_method='fp8': quantized"),
    (DENSE, rope(rope_type="x"), r"rope_type='x': transformers has no such embedding"),
    (DENSE, rope(rope_type="dynamic", factor=2.0), r"rope_type='dynamic': .* longest document"),
    (
        MOE,
        rope(rope_type="longrope", factor=2.0, short_factor=[1.0] * 4, long_factor=[2.0] * 4),
        r"rope_type='longrope': .* longest document",
    ),
    (DENSE, rope(rope_type="yarn"), r"'rope_type'='yarn': \{'factor'\}"),
    (DENSE, rope(rope_type="yarn", factor="x"), r"'factor': 'x'.*they make no embedding"),
    (DENSE, rope(rope_type="linear", factor=0.0), r"'factor': 0.0.*its frequencies are not finite"),
    (DENSE, rope(rope_type="default", rope_theta=-1.0), r"rope_theta=-1.0: .* greater than 0"),
    (
        DENSE,
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        r"one embedding|no readable config.json",  # transformers 5.17 cannot read it
    ),
]


@pytest.mark.parametrize(
    ("architecture", "change", "message"),
    REFUSED,
    ids=[f"{architecture.type} {change}" for architecture, change, _ in REFUSED],
)
def test_a_config_json_that_makes_no_network_that_can_be_trained_is_refused(
    tmp_path: Path, architecture: DenseArchitecture, change: dict[str, object], message: str
) -> None:
    inline_config(architecture).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=message) as refusal:
        resolve_architecture(ModelConfig(name=str(tmp_path)))
    assert str(refusal.value).startswith(f"model.name={str(tmp_path)!r} has no readable") or str(
        refusal.value
    ).endswith("choose another model, or correct the file")
