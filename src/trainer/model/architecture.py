"""Resolves the `model` section to a transformers config, and hub names to folders.

Owns where a model's files lie and which shapes it has. Does not own reading of its weights
(`weights.py`) nor construction (`setup.py`).
"""

from pathlib import Path
from typing import Any, cast

import huggingface_hub
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    StrictDataclassError,
)
from pydantic import ValidationError
from transformers import AutoConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from trainer.config.model import Architecture, DenseArchitecture, ModelConfig, MoEArchitecture
from trainer.errors import UserError
from trainer.origin import companions, find_checkpoint

QwenConfig = Qwen3Config | Qwen3MoeConfig

_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]


def resolve_architecture(config: ModelConfig) -> QwenConfig:
    """Return the transformers config of the network that `config` asks for.

    Args:
        config: With `name`, shapes come from its `config.json`; with `architecture`, from there;
            with both, they must agree.

    Raises:
        UserError: the folder or hub name is not there or not of a supported kind, or it disagrees
            with `model.architecture`.
    """
    if config.name is None:
        assert config.architecture is not None, "ModelConfig has a source"
        return inline_config(config.architecture)
    published = _published_config(config.name)
    if config.architecture is not None:
        _check_agreement(config.name, published, inline_config(config.architecture))
    return published


def locate_model(name: str, *, with_weights: bool) -> Path:
    """Return the local folder of `model.name`, downloading a hub model that is not cached.

    Args:
        name: A folder, a checkpoint of a run, or a name on the hub.
        with_weights: Also fetch the safetensors files; a checkpoint has none.

    Raises:
        UserError: there is no such folder or hub model, or the hub cannot be reached; or weights
            are asked of a checkpoint.
    """
    if with_weights and find_checkpoint(name) is not None:
        raise UserError(
            f"model.name={name!r} is a checkpoint, not a folder of safetensors: "
            "trainer.checkpoint.start_model reads it, and 'trainer export' makes such a folder"
        )
    folder = Path(companions(name)).expanduser()
    if folder.is_dir():
        return folder
    if name.startswith((".", "/", "~")):
        raise UserError(f"model.name={name!r}: there is no such folder; correct the path")
    patterns = [*_SMALL_FILES, "*.safetensors"] if with_weights else _SMALL_FILES
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"model.name={name!r} is neither a local folder nor a hub model that can be fetched "
            f"now ({type(error).__name__}): give an existing folder, or check name and network"
        ) from error


def inline_config(architecture: Architecture) -> QwenConfig:
    """Return the transformers config with the shapes of `[model.architecture]`."""
    fields = architecture.model_dump(exclude={"type", "rope_theta"})
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": architecture.rope_theta}
    match architecture:
        case MoEArchitecture():
            fields["mlp_only_layers"] = list(architecture.mlp_only_layers)
            return Qwen3MoeConfig(**fields)
        case DenseArchitecture():
            return Qwen3Config(**fields)


def _published_config(name: str) -> QwenConfig:
    folder = locate_model(name, with_weights=False)
    try:
        published: PreTrainedConfig = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError, AttributeError, StrictDataclassError) as error:
        raise UserError(
            f"model.name={name!r} has no readable config.json ({error}): "
            "give a folder in Hugging Face layout"
        ) from error
    if not isinstance(published, (Qwen3Config, Qwen3MoeConfig)):
        raise UserError(
            f"model.name={name!r} is a {published.model_type!r} model: "
            "only 'qwen3' and 'qwen3_moe' can be trained"
        )
    if published.use_sliding_window:
        raise UserError(
            f"model.name={name!r} has use_sliding_window=true: sliding windows are not supported, "
            "choose a model without"
        )
    _check_published(name, published)
    return published


def _check_published(name: str, published: QwenConfig) -> None:
    """Hold a config.json to the rules of `[model.architecture]`, and to what is computed here.

    Raises:
        UserError: a value is out of range, does not go with another, or would be ignored.
    """
    rope_type = cast(dict[str, Any], published.rope_parameters)["rope_type"]
    moe = isinstance(published, Qwen3MoeConfig)
    if moe and published.hidden_act != "silu":
        problem = f"hidden_act={published.hidden_act!r}: experts compute silu"
    elif published.hidden_act not in ACT2FN:
        problem = f"hidden_act={published.hidden_act!r}: transformers has no such function"
    elif rope_type not in {"default", *ROPE_INIT_FUNCTIONS}:
        problem = f"rope_type={rope_type!r}: transformers has no such embedding"
    else:
        problem = _shape_problem(published)
    if problem:
        raise UserError(
            f"model.name={name!r}: its config.json has {problem}; choose another model, or correct "
            "the file"
        )


def _shape_problem(published: QwenConfig) -> str:
    section = MoEArchitecture if isinstance(published, Qwen3MoeConfig) else DenseArchitecture
    try:
        section.model_validate(_shape_fields(published))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        shown = f"{place}={first['input']!r}: " if place else ""
        return shown + first["msg"].removeprefix("Value error, ")
    return ""


def _check_agreement(name: str, published: QwenConfig, inline: QwenConfig) -> None:
    theirs, ours = _shape_fields(published), _shape_fields(inline)
    differing = [field for field in ours if theirs.get(field) != ours[field]]
    if differing:
        field = differing[0]
        raise UserError(
            f"model.architecture.{field}={ours[field]!r} but {name!r} has {theirs.get(field)!r}: "
            f"the two must agree ({len(differing)} fields differ); drop [model.architecture] or "
            "model.name"
        )


def _shape_fields(config: QwenConfig) -> dict[str, Any]:
    rope = cast(dict[str, Any], config.rope_parameters)
    fields = {"type": config.model_type, "rope_theta": rope["rope_theta"]}
    values = config.to_dict()
    # transformers serializes `num_experts` under an older name in some versions.
    values["num_experts"] = config.num_experts if isinstance(config, Qwen3MoeConfig) else None
    moe = isinstance(config, Qwen3MoeConfig)
    names = MoEArchitecture.model_fields if moe else DenseArchitecture.model_fields
    ignored = {"type", "rope_theta", "initializer_range", "max_position_embeddings"}
    return fields | {name: values[name] for name in names if name not in ignored}
