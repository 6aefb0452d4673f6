"""A folder in Hugging Face layout: safetensors files of bounded size, index, configs, tokenizer.

Owns which tensor goes into which file and the files beside the weights. Does not gather tensors
(`export.py`) and does not name folders or make them durable (`trainer.durable`).
"""

import copy
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from trainer.durable import tokenizer_errors
from trainer.errors import UserError
from trainer.model.hf_names import Piece

WEIGHT_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
GIB = 2**30
DEFAULT_SHARD_GIB = 5.0


@dataclass(frozen=True)
class FilePlan:
    """Which published tensors each file holds, decided from names and shapes alone.

    Attributes:
        files: Per file its name and the tensors in it, in the order they must be added.
        total_bytes: Bytes of all tensors.
    """

    files: tuple[tuple[str, tuple[str, ...]], ...]
    total_bytes: int


def plan_files(pieces: list[Piece], dtype: torch.dtype, max_shard_gib: float) -> FilePlan:
    """Fill files one after the other, none above the limit unless one tensor alone is.

    Args:
        pieces: All published tensors, in writing order.
        dtype: What they are written as.
        max_shard_gib: Largest size of a file in GiB.
    """
    groups: list[list[str]] = [[]]
    filled, total = 0, 0
    for piece in pieces:
        size = math.prod(piece.shape) * dtype.itemsize
        if groups[-1] and filled + size > max_shard_gib * GIB:
            groups.append([])
            filled = 0
        groups[-1].append(piece.name)
        filled, total = filled + size, total + size
    names = _file_names(len(groups))
    return FilePlan(tuple(zip(names, map(tuple, groups), strict=True)), total)


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


class WeightFiles:
    """Writes planned files as soon as their tensors are there, holding one file's at a time.

    Args:
        folder: Where the files go.
        plan: Which tensor goes where.
    """

    def __init__(self, folder: Path, plan: FilePlan) -> None:
        self._folder = folder
        self._plan = plan
        self._waiting = list(plan.files)
        self._held: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take the next tensor, on the host in its final dtype, and write its file if it is full.

        Raises:
            UserError: the tensor holds a number that its dtype cannot, or none at all.
        """
        file_name, names = self._waiting[0]
        assert name == names[len(self._held)], f"{name} is not the next of {file_name}"
        if not torch.stack(tensor.aminmax()).isfinite().all():
            raise UserError(
                f"{name} has values that {str(tensor.dtype).removeprefix('torch.')} cannot hold: "
                "write the weights as bfloat16 or float32 (ckpt.weights_dtype; --dtype of 'trainer "
                "export')"
            )
        self._held[name] = tensor.contiguous()
        if len(self._held) == len(names):
            save_file(self._held, self._folder / file_name, metadata={"format": "pt"})
            self._held = {}
            self._waiting.pop(0)

    def finish(self) -> None:
        """Write the index, where there are several files."""
        assert not self._waiting, f"{self._waiting[0][0]} is not full"
        if len(self._plan.files) == 1:
            return
        weight_map = {name: file for file, names in self._plan.files for name in names}
        index = {
            "metadata": {"total_size": self._plan.total_bytes},
            "weight_map": dict(sorted(weight_map.items())),
        }
        _write_json(self._folder / "model.safetensors.index.json", index)


def write_companions(
    config: PretrainedConfig,
    generation: GenerationConfig | None,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    dtype: str | None = None,
) -> None:
    """Write what stands beside the weights: `config.json`, generation config, tokenizer.

    Args:
        config: The model's config.
        generation: The model's defaults of sampling; None: it has none.
        tokenizer: What the model was trained with; None: none is written.
        folder: Where to.
        dtype: Dtype of the weights; None: left open, as in a checkpoint.

    Raises:
        OSError: a file cannot be written.
    """
    _write_json(folder / "config.json", published_config(config, dtype))
    published = published_generation_config(
        generation or GenerationConfig.from_model_config(config), tokenizer
    )
    # Not `save_pretrained`, which refuses what others have published.
    published.to_json_file(folder / "generation_config.json")
    if tokenizer is not None:
        _save_tokenizer(tokenizer, folder)


def published_generation_config(
    generation: GenerationConfig, tokenizer: PreTrainedTokenizerBase | None
) -> GenerationConfig:
    """Return the defaults of sampling with the tokenizer's special tokens.

    The tokenizer's end of text comes first; what else ended texts before still does, if it is a
    special token of this tokenizer: of another one it may be a letter here.
    """
    published = copy.deepcopy(generation)
    if tokenizer is None:
        return published
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    before = generation.eos_token_id
    before = before if isinstance(before, list) else [before]
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends = list(dict.fromkeys([*ends, *(end for end in before if end in special)]))
    published.eos_token_id = ends if len(ends) > 1 else next(iter(ends), None)
    for name in ("bos_token_id", "pad_token_id"):
        if (token_id := getattr(tokenizer, name)) is not None:
            setattr(published, name, token_id)
    return published


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    with tokenizer_errors():
        tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    _write_json(path, published_tokenizer_config(json.loads(path.read_text())))


def published_tokenizer_config(content: dict[str, Any]) -> dict[str, Any]:
    """Return `tokenizer_config.json` in names that v4 and v5 both read.

    v4 fails on v5's class name and on a list of extra special tokens.
    """
    content = dict(content)
    if content["tokenizer_class"] == "TokenizersBackend":
        content["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(content.get("extra_special_tokens"), list):
        content["additional_special_tokens"] = content.pop("extra_special_tokens")
    return content


def published_config(config: PretrainedConfig, dtype: str | None) -> dict[str, Any]:
    """Return `config.json` for readers on transformers v5 and v4.

    v4 knows neither `rope_parameters` nor `num_local_experts` nor `dtype`, and takes its own
    defaults without a word, so the older names are written beside the newer ones.
    """
    content = config.to_dict()
    for key in ("_name_or_path", "id2label", "label2id"):
        content.pop(key, None)
    content["architectures"] = [ARCHITECTURES[config.model_type]]
    rope = content["rope_parameters"]
    content["rope_theta"] = rope["rope_theta"]
    if rope["rope_type"] != "default":
        content["rope_scaling"] = rope
    if config.model_type == "qwen3_moe":
        content["num_experts"] = config.num_experts
    content["dtype"] = content["torch_dtype"] = dtype
    return content


def weight_dtype(name: str) -> torch.dtype:
    """Return the dtype of that name.

    Raises:
        UserError: weights are not written in it.
    """
    if name not in WEIGHT_DTYPES:
        raise UserError(
            f"dtype={name!r}: weights are written as one of {', '.join(WEIGHT_DTYPES)}; choose one"
        )
    return WEIGHT_DTYPES[name]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
