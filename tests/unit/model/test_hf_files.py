import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3MoeConfig

from trainer.data import build_byte_tokenizer
from trainer.errors import UserError
from trainer.model.hf_files import (
    GIB,
    WeightFiles,
    plan_files,
    published_config,
    published_tokenizer_config,
    weight_dtype,
    write_companions,
)
from trainer.model.hf_names import Piece

PIECES = [Piece("a", (4,)), Piece("b", (2, 2)), Piece("c", (9,)), Piece("d", (1,))]


def test_files_are_filled_in_order_up_to_the_limit():
    plan = plan_files(PIECES, torch.float32, 32 / GIB)
    assert plan.files == (
        ("model-00001-of-00003.safetensors", ("a", "b")),
        ("model-00002-of-00003.safetensors", ("c",)),
        ("model-00003-of-00003.safetensors", ("d",)),
    )
    assert plan.total_bytes == 18 * 4


def test_what_fits_into_one_file_needs_no_index(tmp_path: Path):
    plan = plan_files(PIECES[:1], torch.float32, 1.0)
    files = WeightFiles(tmp_path, plan)
    files.add("a", torch.arange(4.0))
    files.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_index_says_where_each_tensor_is(tmp_path: Path):
    files = WeightFiles(tmp_path, plan_files(PIECES, torch.float32, 32 / GIB))
    tensors = {piece.name: torch.randn(piece.shape) for piece in PIECES}
    for name, tensor in tensors.items():
        files.add(name, tensor)
    files.finish()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 72}
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])


def test_value_that_the_written_dtype_cannot_hold_is_refused(tmp_path: Path):
    files = WeightFiles(tmp_path, plan_files(PIECES, torch.float16, 1.0))
    with pytest.raises(UserError, match=r"a has values that float16 cannot hold: write .*bfloat16"):
        files.add("a", torch.full((4,), 1e6).half())


def test_tokenizer_that_cannot_be_written_is_an_os_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tokenizer = build_byte_tokenizer()

    def fail(_: Path) -> None:
        raise Exception("No space left on device (os error 28)")

    monkeypatch.setattr(tokenizer, "save_pretrained", fail)
    with pytest.raises(OSError, match="tokenizer: No space left"):
        write_companions(Qwen3Config(), None, tokenizer, tmp_path)


def test_unknown_dtype_is_refused():
    with pytest.raises(UserError, match="dtype='int8': weights are written as one of float32"):
        weight_dtype("int8")


def test_config_serves_readers_of_both_major_versions():
    rope = {"rope_theta": 5e5, "rope_type": "default"}
    config = Qwen3MoeConfig(num_experts=4, rope_parameters=rope)
    content = published_config(config, "bfloat16")
    assert content["rope_theta"] == content["rope_parameters"]["rope_theta"] == 5e5
    assert content["num_experts"] == 4
    assert content["dtype"] == content["torch_dtype"] == "bfloat16"
    assert content["architectures"] == ["Qwen3MoeForCausalLM"]


def test_tokenizer_config_serves_readers_of_both_major_versions():
    content = published_tokenizer_config(
        {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<|im_start|>"]}
    )
    assert content == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": ["<|im_start|>"],
    }
    assert published_tokenizer_config({"tokenizer_class": "Qwen2Tokenizer"}) == {
        "tokenizer_class": "Qwen2Tokenizer"
    }


def test_scaled_rope_is_given_under_its_older_name_too():
    rope = {"rope_theta": 1e6, "rope_type": "linear", "factor": 4.0}
    content = published_config(Qwen3Config(rope_parameters=rope), None)
    assert content["rope_scaling"] == content["rope_parameters"]
    assert content["architectures"] == ["Qwen3ForCausalLM"]
