"""Whether a checkpoint fits the live model and optimizer: checked by name before anything is read.

Owns every refusal that compares tensors; `config_changes.py` owns those that compare configs.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer
from transformers import PretrainedConfig

from trainer.checkpoint.manifest import Manifest
from trainer.checkpoint.safe_load import tensor_entries
from trainer.checkpoint.shards import Shards
from trainer.checkpoint.state import MODEL, OPTIMIZER, RNG, OptimizerView
from trainer.config.model import DenseArchitecture, MoEArchitecture

NAMES_SHOWN = 4
NOT_IN_THE_NETWORK = {"type", "initializer_range", "max_position_embeddings"}


def architecture_of(config: PretrainedConfig) -> dict[str, Any]:
    """Return what makes the network, shapes and all: the fields that must not change on resume."""
    section = MoEArchitecture if config.model_type == "qwen3_moe" else DenseArchitecture
    content = config.to_dict() | {"rope_theta": config.rope_parameters["rope_theta"]}
    if section is MoEArchitecture:
        content["num_experts"] = config.num_experts
    fields = sorted(section.model_fields.keys() - NOT_IN_THE_NETWORK)
    return {"type": config.model_type} | {field: content[field] for field in fields}


def find_mismatch(
    optimizer: Optimizer,
    view: OptimizerView,
    shards: Shards,
    index: Metadata,
    manifest: Manifest,
    config: PretrainedConfig,
) -> str | None:
    """Say what keeps a checkpoint from loading, or None.

    Args:
        optimizer: The live optimizer.
        view: Its state by name.
        shards: The tensors to be filled; generators (`rng.`) are not compared.
        index: The checkpoint's tensors.
        manifest: The checkpoint's JSON part.
        config: The live model's.
    """
    if other := _other_architecture(manifest, config):
        return other
    saved_names = [name for group in manifest.optimizer.groups for name in group["names"]]
    state_problems = _key_problems("optimizer state", OPTIMIZER, shards, index)
    live_type, saved_type = type(optimizer).__name__, manifest.optimizer.type
    if live_type != saved_type and state_problems:
        # Ours and dion's Muon differ in name and share their state.
        return (
            f"its optimizer is {saved_type}, this run's is {live_type} (optim.type): state of one "
            "means nothing to the other; resume with the same optim.type, or start a new run from "
            "exported weights"
        )
    problems = [
        *_key_problems("model", MODEL, shards, index),
        *_differing_names("trained parameters", saved_names, view.names),
        *state_problems,
    ]
    known = (MODEL, OPTIMIZER, RNG)
    foreign = [key for key in index.state_dict_metadata if not key.startswith(known)]
    if foreign:
        problems.append(f"it holds {_some(foreign)}, which no checkpoint of this trainer has")
    return "; ".join(problems) or None


def find_network_mismatch(
    shards: Shards, index: Metadata, manifest: Manifest, config: PretrainedConfig
) -> str | None:
    """Say what keeps a checkpoint's weights alone from loading, or None; arguments as above."""
    if other := _other_architecture(manifest, config):
        return other
    return "; ".join(_key_problems("model", MODEL, shards, index)) or None


def _other_architecture(manifest: Manifest, config: PretrainedConfig) -> str | None:
    there, here = manifest.architecture, architecture_of(config)
    differing = sorted(key for key in there | here if there.get(key) != here.get(key))
    if not differing:
        return None
    return "it is of another model: " + ", ".join(
        f"{key} is {there.get(key)!r} there and {here.get(key)!r} here" for key in differing
    )


def _key_problems(what: str, prefix: str, shards: Shards, index: Metadata) -> list[str]:
    live = {key: shard for key, shard in shards.items() if key.startswith(prefix)}
    saved = tensor_entries(index, prefix)
    problems = _differing_names(what, saved, live)
    for key in live.keys() & saved.keys():
        problems += _tensor_problems(key, saved[key], live[key].shape, live[key].local.dtype)
    return sorted(problems)[:NAMES_SHOWN]


def _differing_names(what: str, saved: Iterable[str], live: Iterable[str]) -> list[str]:
    missing, extra = sorted(set(live) - set(saved)), sorted(set(saved) - set(live))
    problems = []
    if missing:
        problems.append(f"{what}: it lacks {_some(missing)}")
    if extra:
        problems.append(f"{what}: it has {_some(extra)}, which this run has not")
    return problems


def _tensor_problems(
    key: str, entry: TensorStorageMetadata, shape: torch.Size, dtype: torch.dtype
) -> list[str]:
    problems = []
    if entry.size != shape:
        problems.append(f"{key} is {list(entry.size)} there and {list(shape)} here")
    if entry.properties.dtype != dtype:
        problems.append(f"{key} is {entry.properties.dtype} there and {dtype} here")
    if _num_values(entry) != entry.size.numel():
        problems.append(f"{key} is not covered by its parts")
    return problems


def _num_values(entry: TensorStorageMetadata) -> int:
    return sum(chunk.sizes.numel() for chunk in entry.chunks)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN])
    return shown + (f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else "")
