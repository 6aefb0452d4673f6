"""Which published `config.json` can be trained: each that cannot is refused by one message.

Owns the rules. A network is computed by transformers' layers with our masks, experts and loss, so
a field is honoured by them, honoured by us, or refused here; none is ignored where it would change
a number. Does not own where the file lies (`architecture.py`).
"""

from typing import Any

from pydantic import ValidationError
from transformers import Qwen3Config, Qwen3MoeConfig
from transformers.activations import ACT2FN

from trainer.config.model import DenseArchitecture, MoEArchitecture
from trainer.errors import UserError
from trainer.model import rotary
from trainer.model.rotary import QwenConfig, rope_parameters


def check_published(name: str, published: QwenConfig) -> None:
    """Hold a config.json to the rules of `[model.architecture]`, and to what is computed here.

    Raises:
        UserError: a value is out of range, does not go with another, or would be ignored.
    """
    checks = (
        _activation_problem,
        _attention_problem,
        _weights_problem,
        rotary.kind_problem,
        _shape_problem,
        _padding_problem,
        rotary.value_problem,
    )
    problem = next(filter(None, (check(published) for check in checks)), None)
    if problem is not None:
        raise UserError(
            f"model.name={name!r}: its config.json has {problem}; choose another model, or correct "
            "the file"
        )


def shape_fields(config: QwenConfig) -> dict[str, Any]:
    """Return the fields that `[model.architecture]` has too and that shape or change a network."""
    values = config.to_dict()
    # transformers serializes `num_experts` under an older name in some versions.
    values["num_experts"] = config.num_experts if isinstance(config, Qwen3MoeConfig) else None
    moe = isinstance(config, Qwen3MoeConfig)
    names = MoEArchitecture.model_fields if moe else DenseArchitecture.model_fields
    ignored = {"type", "rope_theta", "initializer_range", "max_position_embeddings"}
    fields = {"type": config.model_type, "rope_theta": rope_parameters(config)["rope_theta"]}
    return fields | {name: values[name] for name in names if name not in ignored}


def _activation_problem(published: QwenConfig) -> str:
    if isinstance(published, Qwen3MoeConfig) and published.hidden_act != "silu":
        return f"hidden_act={published.hidden_act!r}: experts compute silu"
    if published.hidden_act not in ACT2FN:
        return f"hidden_act={published.hidden_act!r}: transformers has no such function"
    return ""


def _attention_problem(published: QwenConfig) -> str:
    if published.use_sliding_window:
        return "use_sliding_window=true: sliding windows are not supported"
    kinds = (published.layer_types or []) if isinstance(published, Qwen3Config) else []
    if other := sorted(set(kinds) - {"full_attention"}):
        return f"layer_types with {other[0]!r}: a token sees all that precedes it in its document"
    if published.attention_dropout:
        return (
            f"attention_dropout={published.attention_dropout!r}: numbers would depend on how the "
            "model is sharded; set it to 0"
        )
    if published.to_dict().get("is_causal", True) is not True:
        return "is_causal=false: a token would be trained to predict what it sees"
    return ""


def _weights_problem(published: QwenConfig) -> str:
    quantization = published.to_dict().get("quantization_config")
    if quantization is None:
        return ""
    method = quantization.get("quant_method")
    return f"quantization_config with quant_method={method!r}: quantized weights cannot be trained"


def _shape_problem(published: QwenConfig) -> str:
    section = MoEArchitecture if isinstance(published, Qwen3MoeConfig) else DenseArchitecture
    try:
        section.model_validate(shape_fields(published))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        shown = f"{place}={first['input']!r}: " if place else ""
        return shown + first["msg"].removeprefix("Value error, ")
    return ""


def _padding_problem(published: QwenConfig) -> str:
    pad, size = published.pad_token_id, published.vocab_size
    if pad is not None and not -size <= pad < size:
        return f"pad_token_id={pad} with vocab_size={size}: it must be an id below vocab_size"
    return ""
