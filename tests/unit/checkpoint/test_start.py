"""A network that starts from a checkpoint: its weights, whatever was trained; two ranks: see
`tests/integration/test_a_run_starts_from_a_checkpoint.py`."""

from pathlib import Path

import pytest
import torch

from tests.support.networks import dense_architecture, moe_architecture, random_model
from trainer.checkpoint import CheckpointStore, start_model
from trainer.config.model import ModelConfig
from trainer.config.optim import AdamWConfig
from trainer.errors import UserError
from trainer.model import setup_model
from trainer.optim import setup_optimizer

ARCHITECTURES = {
    "mixture": moe_architecture(),
    "dense": dense_architecture(),
    "tied": moe_architecture(tie_word_embeddings=True),
    "tied and dense": dense_architecture(tie_word_embeddings=True),
}


def saved(folder: Path, architecture, mesh):
    model = setup_model(random_model(architecture), mesh, seed=5)
    optimizer = setup_optimizer(AdamWConfig(), model.named_parameters(), mesh)
    CheckpointStore(folder).save(4, model, optimizer, {})
    return model, str(folder / "step_4")


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_weights_and_shapes_are_the_checkpoint_s(tmp_path: Path, mesh, architecture):
    model, name = saved(tmp_path, architecture, mesh)
    started = start_model(ModelConfig(name=name, compute_dtype="float32"), mesh, seed=1)
    expected = dict(model.named_parameters())
    assert started.config.tie_word_embeddings == architecture.tie_word_embeddings
    assert dict(started.named_parameters()).keys() == expected.keys()
    for key, parameter in started.named_parameters():
        assert torch.equal(parameter.full_tensor(), expected[key].full_tensor()), key
    ids = torch.arange(6).unsqueeze(0)
    # Ties, rotary frequencies and all else that is no parameter too.
    positions = torch.arange(6).unsqueeze(0)
    outputs = [m(ids, position_ids=positions, target_ids=ids) for m in (model, started)]
    assert torch.equal(outputs[0].log_probs_PS, outputs[1].log_probs_PS)


def test_shapes_given_beside_a_checkpoint_must_be_its_own(tmp_path: Path, mesh):
    _, name = saved(tmp_path, moe_architecture(), mesh)
    start_model(ModelConfig(name=name, architecture=moe_architecture()), mesh)
    for other in (moe_architecture(num_experts=8), dense_architecture()):
        with pytest.raises(UserError, match=r"^model\.architecture\..*the two must agree"):
            start_model(ModelConfig(name=name, architecture=other), mesh)


def test_random_weights_beside_a_checkpoint_are_refused(tmp_path: Path, mesh):
    _, name = saved(tmp_path, moe_architecture(), mesh)
    with pytest.raises(UserError, match=r"model\.weights='random' while model\.name="):
        start_model(ModelConfig(name=name, weights="random"), mesh)


def test_what_reads_safetensors_says_who_reads_checkpoints(tmp_path: Path, mesh):
    _, name = saved(tmp_path, moe_architecture(), mesh)
    with pytest.raises(UserError, match=r"trainer\.checkpoint\.start_model reads it"):
        setup_model(ModelConfig(name=name), mesh)
