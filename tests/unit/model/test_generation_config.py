"""Sampling defaults that a model was published with: kept by what is saved, never applied."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.support.meshes import one_rank_mesh
from tests.support.networks import moe_architecture, random_model
from trainer.checkpoint import CheckpointStore, start_model
from trainer.checkpoint.export import export_checkpoint
from trainer.config.model import ModelConfig
from trainer.config.optim import AdamWConfig
from trainer.data import build_byte_tokenizer
from trainer.errors import UserError
from trainer.model import setup_model
from trainer.model.export import save_hf_weights
from trainer.model.generate import generate_greedily
from trainer.model.hf_files import published_generation_config
from trainer.optim import setup_optimizer

NAME = "generation_config.json"
PUBLISHED = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "repetition_penalty": 1.05,
    "eos_token_id": [257, 256],
    "bos_token_id": 5,
}


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with one_rank_mesh() as mesh:
        yield mesh


@pytest.fixture
def published(tmp_path: Path, mesh: DeviceMesh) -> Path:
    """A folder in Hugging Face layout with sampling defaults of its own."""
    folder = tmp_path / "published"
    model = setup_model(random_model(moe_architecture(vocab_size=320)), mesh)
    save_hf_weights(model, None, folder, "float32")
    (folder / NAME).write_text(json.dumps(PUBLISHED))
    return folder


def section(name: Path) -> ModelConfig:
    return ModelConfig(name=str(name), compute_dtype="float32")


def read(folder: Path) -> dict[str, object]:
    return json.loads((folder / NAME).read_text())


def test_weights_checkpoints_and_exports_keep_them(
    tmp_path: Path, published: Path, mesh: DeviceMesh
) -> None:
    tokenizer = build_byte_tokenizer()
    expected = PUBLISHED | {
        "eos_token_id": [tokenizer.eos_token_id, 257, 256],
        "bos_token_id": tokenizer.bos_token_id or 5,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model = setup_model(section(published), mesh)
    save_hf_weights(model, tokenizer, tmp_path / "weights", "float32")
    assert read(tmp_path / "weights").items() >= expected.items()
    optimizer = setup_optimizer(AdamWConfig(), model.named_parameters(), mesh)
    CheckpointStore(tmp_path / "checkpoints", tokenizer=tokenizer).save(1, model, optimizer, {})
    checkpoint = tmp_path / "checkpoints" / "step_1"
    export_checkpoint(checkpoint, tmp_path / "exported")
    assert read(tmp_path / "exported").items() >= expected.items()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert plain.generation_config.top_k == 20
    # A run that starts from the checkpoint, or resumes, has them from there.
    again = start_model(section(checkpoint), mesh)
    save_hf_weights(again, tokenizer, tmp_path / "again", "float32")
    assert read(tmp_path / "again").items() >= expected.items()


def test_our_own_decoding_does_not_apply_them(published: Path, mesh: DeviceMesh) -> None:
    def decode() -> list[list[int]]:
        return generate_greedily(
            setup_model(section(published), mesh),
            [[3, 4, 5], [6, 7]],
            max_new_tokens=12,
            eos_id=319,
            pad_id=0,
            device=torch.device("cpu"),
        )

    (published / NAME).write_text(json.dumps({"repetition_penalty": 50.0, "eos_token_id": 2}))
    penalized = decode()
    (published / NAME).unlink()
    assert penalized == decode()
    # As many as asked for: the published end of text ends nothing.
    assert [len(ids) for ids in penalized] == [12, 12]


def test_decoding_leaves_them_to_the_model(published: Path, mesh: DeviceMesh) -> None:
    model = setup_model(section(published), mesh)
    generate_greedily(
        model, [[3]], max_new_tokens=2, eos_id=319, pad_id=0, device=torch.device("cpu")
    )
    assert model.generation_config.top_k == 20


def test_a_damaged_file_is_refused_by_its_name(published: Path, mesh: DeviceMesh) -> None:
    (published / NAME).write_text("{")
    message = r"model\.name='.*published' has no readable generation_config\.json .*remove it"
    with pytest.raises(UserError, match=message):
        setup_model(section(published), mesh)


def test_what_transformers_would_not_save_is_kept(
    tmp_path: Path, published: Path, mesh: DeviceMesh
) -> None:
    # A temperature without sampling is refused by GenerationConfig.save_pretrained.
    (published / NAME).write_text(json.dumps({"do_sample": False, "temperature": 0.6}))
    save_hf_weights(setup_model(section(published), mesh), None, tmp_path / "out")
    assert read(tmp_path / "out")["temperature"] == 0.6


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, 258), (258, 258), (256, [258, 256]), ([257, 258], [258, 257]), ([], 258), (7, 258)],
    ids=str,
)
def test_the_tokenizers_end_comes_first(before: object, after: object) -> None:
    tokenizer = build_byte_tokenizer()
    assert tokenizer.eos_token_id == 258, "the cases above name it"
    config = GenerationConfig(eos_token_id=before)
    assert published_generation_config(config, tokenizer).eos_token_id == after
    assert config.eos_token_id == before


def test_without_a_tokenizer_nothing_changes() -> None:
    config = GenerationConfig(eos_token_id=[7, 9], top_k=3)
    assert published_generation_config(config, None).to_dict() == config.to_dict()
