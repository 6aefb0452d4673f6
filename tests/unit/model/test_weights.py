import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM

from tests.support.meshes import one_rank_mesh
from tests.support.networks import dense_architecture, moe_architecture, packed_batch
from trainer.config.model import DenseArchitecture, ModelConfig, MoEArchitecture
from trainer.errors import UserError
from trainer.model.architecture import inline_config
from trainer.model.setup import setup_model

Tensors = dict[str, Tensor]


def transformers_model(architecture: DenseArchitecture | MoEArchitecture):
    torch.manual_seed(1)
    is_moe = isinstance(architecture, MoEArchitecture)
    kind = Qwen3MoeForCausalLM if is_moe else Qwen3ForCausalLM
    return kind(inline_config(architecture)).eval()


def pretrained(folder: Path, **changes: object) -> ModelConfig:
    fields = {"name": str(folder), "compute_dtype": "float32"}
    return ModelConfig.model_validate(fields | changes)


def edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def fuse_experts(tensors: Tensors) -> None:
    """Turn per-expert names into the stacks that transformers holds in memory."""
    stems = {m[1] for name in tensors if (m := re.match(r"(.*\.experts)\.\d+\.", name))}
    for stem in stems:
        gate, up, down = (
            torch.stack([tensors.pop(f"{stem}.{e}.{kind}_proj.weight") for e in range(4)])
            for kind in ("gate", "up", "down")
        )
        tensors[f"{stem}.gate_up_proj"] = torch.cat([gate, up], dim=1)
        tensors[f"{stem}.down_proj"] = down


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["dense", "moe", "moe-sharded-files", "moe-fused"])
@torch.no_grad()
def test_logits_equal_those_of_transformers(tmp_path: Path, kind: str, tied: bool) -> None:
    make = dense_architecture if kind == "dense" else moe_architecture
    reference = transformers_model(make(tie_word_embeddings=tied))
    reference.save_pretrained(
        tmp_path, max_shard_size="20KB" if kind == "moe-sharded-files" else "1GB"
    )
    if kind == "moe-fused":
        edit(tmp_path, fuse_experts)
    input_ids, _, _ = packed_batch([[12], [12]])
    position_ids = torch.arange(12).expand(2, 12)
    with one_rank_mesh() as mesh:
        model = setup_model(pretrained(tmp_path), mesh).eval()
        logits = model(input_ids, position_ids=position_ids, logits=True)
    expected = reference(input_ids, use_cache=False).logits
    # The experts' sums run in another order.
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=2e-6)


@torch.no_grad()
def test_bf16_is_as_exact_as_that_of_transformers(tmp_path: Path) -> None:
    reference = transformers_model(moe_architecture())
    reference.save_pretrained(tmp_path)
    input_ids, _, _ = packed_batch([[12], [12]])
    exact = reference(input_ids, use_cache=False).logits
    theirs = reference.bfloat16()(input_ids, use_cache=False).logits
    with one_rank_mesh() as mesh:
        model = setup_model(pretrained(tmp_path, compute_dtype="bfloat16"), mesh).eval()
        ours = model(input_ids, position_ids=torch.arange(12).expand(2, 12), logits=True)
    assert ours.dtype == torch.bfloat16
    # The router multiplies in bf16 as theirs does, so both choose alike; 1.2 leaves room for the
    # order of sums.
    assert (ours - exact).norm() <= 1.2 * (theirs - exact).norm()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    transformers_model(moe_architecture()).save_pretrained(tmp_path)
    return tmp_path


def refuse(folder: Path, message: str, **changes: object) -> None:
    with one_rank_mesh() as mesh, pytest.raises(UserError, match=message):
        setup_model(pretrained(folder, **changes), mesh)


EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.pop(EXPERT))
    refuse(folder, rf"lacks the tensor {re.escape(EXPERT)}")


@pytest.mark.parametrize("added", [0.0, 1e-3], ids=["equal", "differs"])
def test_a_tied_copy_must_equal_what_it_is_tied_to(tmp_path: Path, added: float) -> None:
    """transformers does not tie what differs, whatever config.json says."""
    transformers_model(dense_architecture(tie_word_embeddings=True)).save_pretrained(tmp_path)
    embedding = "model.embed_tokens.weight"
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding] + added}))
    if added:
        refuse(tmp_path, rf"tensor lm_head\.weight .* differs from {re.escape(embedding)}, and")
        edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.ones(2, 32)}))
        refuse(tmp_path, r"tensor lm_head\.weight .* has shape \[2, 32\], the .* \[64, 32\]")
    else:
        with one_rank_mesh() as mesh:
            model = setup_model(pretrained(tmp_path), mesh)
            assert model.lm_head.weight is model.model.embed_tokens.weight


def test_an_extra_tensor_is_named(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.extra.weight": torch.ones(1)}))
    refuse(folder, r"holds the tensor model\.extra\.weight in model\.safetensors")


def test_a_misshaped_tensor_is_named_with_both_shapes(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({EXPERT: torch.ones(15, 32)}))
    refuse(folder, rf"tensor {re.escape(EXPERT)} .* has shape \[15, 32\], the .* \[16, 32\]")


def test_a_weight_that_is_not_finite_is_named(folder: Path) -> None:
    edit(folder, lambda tensors: tensors["model.norm.weight"].fill_(torch.nan))
    refuse(folder, r"tensor model\.norm\.weight in model\.safetensors holds values that are not")


def test_quantized_weights_are_refused(folder: Path) -> None:
    def quantize(tensors: Tensors) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)

    edit(folder, quantize)
    refuse(folder, r"tensor model\.norm\.weight in model\.safetensors is torch\.int8: quantized")


@pytest.mark.parametrize("kept", [0, 4, 2000, -1], ids=["empty", "no-header", "header", "short"])
def test_a_half_written_file_is_named(folder: Path, kept: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    refuse(folder, r"model\.safetensors is damaged or half-written")


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refuse(folder, r"lacks the weights file model\.safetensors")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    transformers_model(moe_architecture()).save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    refuse(tmp_path, rf"lacks the weights file {shard.name}")


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"weight_map": []}', '{"weight_map": "x"}'],
    ids=["empty", "list", "in", "x"],
)
def test_a_broken_index_is_named(folder: Path, content: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)
    refuse(folder, r"index\.json is not a weights index")


def test_a_file_that_an_index_calls_by_a_number_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": 7}}')
    refuse(folder, r"lacks the weights file 7")


def test_a_single_file_is_read_before_an_index_as_by_transformers(tmp_path: Path) -> None:
    transformers_model(moe_architecture()).save_pretrained(tmp_path, max_shard_size="20KB")
    whole = transformers_model(moe_architecture())
    with torch.no_grad():
        whole.model.norm.weight.fill_(7.0)
    whole.save_pretrained(tmp_path / "whole")
    (tmp_path / "whole" / "model.safetensors").rename(tmp_path / "model.safetensors")
    theirs = Qwen3MoeForCausalLM.from_pretrained(tmp_path).model.norm.weight
    with one_rank_mesh() as mesh:
        ours = setup_model(pretrained(tmp_path), mesh).model.norm.weight.full_tensor()
    assert set(theirs.tolist()) == set(ours.tolist()) == {7.0}


def test_an_inline_architecture_must_agree(folder: Path) -> None:
    changed = moe_architecture(num_experts_per_tok=1)
    refuse(folder, r"model\.architecture\.num_experts_per_tok=1 but .* has 2", architecture=changed)
    with one_rank_mesh() as mesh:
        setup_model(pretrained(folder, architecture=moe_architecture()), mesh)


def test_random_weights_need_no_weights_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with one_rank_mesh() as mesh:
        setup_model(pretrained(folder, weights="random"), mesh)
