import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM, Qwen3MoeForCausalLM

from tests.support.meshes import one_rank_mesh
from tests.support.networks import dense_architecture, moe_architecture, random_model
from trainer.config.model import ModelConfig
from trainer.data import build_byte_tokenizer
from trainer.errors import UserError
from trainer.model import export, setup_model
from trainer.model.export import save_hf_weights
from trainer.model.hf_files import GIB

MODELS = {
    "moe": moe_architecture(vocab_size=320),
    "moe-tied-one-dense-layer": moe_architecture(
        vocab_size=320, tie_word_embeddings=True, mlp_only_layers=(1,), norm_topk_prob=False
    ),
    "dense": dense_architecture(vocab_size=320, rope_theta=5e4),
}


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with one_rank_mesh() as mesh:
        yield mesh


def stored_names(folder: Path) -> set[str]:
    return {name for path in folder.glob("*.safetensors") for name in load_file(path)}


@pytest.mark.parametrize("architecture", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("max_shard_gib", [1.0, 3e4 / GIB], ids=["one-file", "many-files"])
def test_plain_transformers_gives_the_same_logits_and_generates(
    tmp_path: Path, mesh: DeviceMesh, architecture, max_shard_gib: float
):
    model = setup_model(random_model(architecture), mesh)
    tokenizer = build_byte_tokenizer()
    save_hf_weights(model, tokenizer, tmp_path / "hf", "float32", max_shard_gib)

    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="float32")
    assert type(plain) in (Qwen3ForCausalLM, Qwen3MoeForCausalLM)
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name).full_tensor()), name
    ids = torch.arange(7)[None]
    logits = model(ids, position_ids=ids, logits=True)
    # The same weights through another implementation of attention and experts.
    torch.testing.assert_close(plain(ids, use_cache=False).logits, logits, atol=1e-5, rtol=1e-5)
    text = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert text("héllo").input_ids == tokenizer("héllo").input_ids
    assert text.all_special_tokens == tokenizer.all_special_tokens
    assert plain.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > 7


def test_names_are_those_of_published_checkpoints(tmp_path: Path, mesh: DeviceMesh):
    model = setup_model(random_model(MODELS["moe-tied-one-dense-layer"]), mesh)
    save_hf_weights(model, None, tmp_path / "hf", "bfloat16")
    names = stored_names(tmp_path / "hf")
    layer = "model.layers.0.mlp."
    assert {name for name in names if name.startswith(layer)} == {f"{layer}gate.weight"} | {
        f"{layer}experts.{expert}.{kind}_proj.weight"
        for expert in range(4)
        for kind in ("gate", "up", "down")
    }
    assert "model.layers.1.mlp.gate_proj.weight" in names
    assert "lm_head.weight" not in names


def test_weights_read_back_into_training_unchanged(tmp_path: Path, mesh: DeviceMesh):
    model = setup_model(random_model(MODELS["moe"]), mesh)
    save_hf_weights(model, None, tmp_path / "hf", "float32", 3e4 / GIB)
    again = setup_model(ModelConfig(name=str(tmp_path / "hf"), compute_dtype="float32"), mesh)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), again.get_parameter(name).full_tensor()), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_is_the_one_asked_for(tmp_path: Path, mesh: DeviceMesh, dtype: str):
    model = setup_model(random_model(MODELS["moe"]), mesh)
    save_hf_weights(model, None, tmp_path / "hf", dtype)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert {str(tensor.dtype) for tensor in tensors.values()} == {f"torch.{dtype}"}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == dtype


def test_non_finite_model_is_not_written(tmp_path: Path, mesh: DeviceMesh):
    model = setup_model(random_model(MODELS["moe"]), mesh)
    with torch.no_grad():
        model.get_parameter("model.norm.weight").to_local()[0] = float("nan")
    with pytest.raises(RuntimeError, match=r"weights are not saved: model\.norm\.weight is not"):
        save_hf_weights(model, None, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("place", ["start_folder", "write_companions", "publish"])
def test_failure_to_write_leaves_the_older_weights(
    tmp_path: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, place: str
):
    model = setup_model(random_model(MODELS["moe"]), mesh)
    save_hf_weights(model, None, tmp_path / "hf", "float32")

    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(export, place, fail)
    with pytest.raises(RuntimeError, match=r"weights were not written to .*No space left"):
        save_hf_weights(model, None, tmp_path / "hf", "bfloat16")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "float32"


def test_weights_beyond_the_dtype_s_range_are_refused(tmp_path: Path, mesh: DeviceMesh):
    model = setup_model(random_model(MODELS["moe"]), mesh)
    with torch.no_grad():
        model.get_parameter("model.norm.weight").to_local()[0] = 1e6
    with pytest.raises(UserError, match=r"model\.norm\.weight has values that float16 cannot hold"):
        save_hf_weights(model, None, tmp_path / "hf", "float16")
