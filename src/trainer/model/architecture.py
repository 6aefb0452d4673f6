"""Resolves the `model` section to a transformers config, and hub names to folders.

Owns where a model's files lie and which shapes it has. Does not own reading of its weights
(`weights.py`) nor construction (`setup.py`).
"""

from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    StrictDataclassError,
)
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from trainer.config.model import Architecture, DenseArchitecture, ModelConfig, MoEArchitecture
from trainer.errors import UserError
from trainer.model.published import check_published, shape_fields
from trainer.model.rotary import QwenConfig
from trainer.origin import companions, find_checkpoint

_UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, StrictDataclassError)
"""What transformers raises on a JSON file that it cannot take."""

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


def resolve_generation(config: ModelConfig) -> GenerationConfig | None:
    """Return the defaults of sampling published with `model.name`; None: there are none.

    Raises:
        UserError: the folder or hub name is not there, or its `generation_config.json` is damaged.
    """
    if config.name is None:
        return None
    folder = locate_model(config.name, with_weights=False)
    if not (folder / "generation_config.json").exists():
        return None
    try:
        return GenerationConfig.from_pretrained(folder)
    except _UNREADABLE as error:
        raise UserError(
            f"model.name={config.name!r} has no readable generation_config.json ({error}): "
            "mend or remove it"
        ) from error


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
    folder = Path(companions(name))
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
    except _UNREADABLE as error:
        raise UserError(
            f"model.name={name!r} has no readable config.json ({error}): "
            "give a folder in Hugging Face layout"
        ) from error
    if not isinstance(published, (Qwen3Config, Qwen3MoeConfig)):
        raise UserError(
            f"model.name={name!r} is a {published.model_type!r} model: "
            "only 'qwen3' and 'qwen3_moe' can be trained"
        )
    if "head_dim" not in published.to_dict():
        # A mixture of experts may leave it out; a number of heads below 1 is refused next.
        published.head_dim = published.hidden_size // max(1, published.num_attention_heads)
    check_published(name, published)
    return published


def _check_agreement(name: str, published: QwenConfig, inline: QwenConfig) -> None:
    theirs, ours = shape_fields(published), shape_fields(inline)
    differing = [field for field in ours if theirs.get(field) != ours[field]]
    if differing:
        field = differing[0]
        raise UserError(
            f"model.architecture.{field}={ours[field]!r} but {name!r} has {theirs.get(field)!r}: "
            f"the two must agree ({len(differing)} fields differ); drop [model.architecture] or "
            "model.name"
        )
