from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from tests.support.networks import dense_architecture, moe_architecture, random_model
from trainer.checkpoint import CheckpointStore
from trainer.checkpoint.match import architecture_of, find_mismatch
from trainer.checkpoint.reader import OpenCheckpoint, open_checkpoint
from trainer.checkpoint.state import all_shards, view_optimizer
from trainer.config.optim import AdamWConfig
from trainer.model import setup_model
from trainer.optim import setup_optimizer

NORM = "model.model.norm.weight"


@pytest.fixture
def saved(tmp_path: Path, mesh: DeviceMesh):
    model = setup_model(random_model(moe_architecture()), mesh)
    optimizer = setup_optimizer(AdamWConfig(), model.named_parameters(), mesh)
    CheckpointStore(tmp_path).save(1, model, optimizer, {})
    return open_checkpoint(tmp_path / "step_1"), model, optimizer


def mismatch(checkpoint: OpenCheckpoint, model: PreTrainedModel, optimizer) -> str | None:
    view = view_optimizer(model, optimizer)
    shards = all_shards(model, view, {}, rank=0)
    return find_mismatch(
        optimizer, view, shards, checkpoint.index, checkpoint.manifest, model.config
    )


def norm_entry(checkpoint: OpenCheckpoint) -> TensorStorageMetadata:
    entry = checkpoint.index.state_dict_metadata[NORM]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


def test_what_was_saved_fits(saved):
    assert mismatch(*saved) is None


def test_another_shape_is_named_with_both(saved):
    norm_entry(saved[0]).size = torch.Size([33])
    assert f"{NORM} is [33] there and [32] here" in str(mismatch(*saved))


def test_another_dtype_is_named_with_both(saved):
    norm_entry(saved[0]).properties.dtype = torch.bfloat16
    assert f"{NORM} is torch.bfloat16 there and torch.float32 here" in str(mismatch(*saved))


def test_tensor_with_a_part_missing_is_named(saved):
    norm_entry(saved[0]).chunks.clear()
    assert f"{NORM} is not covered by its parts" in str(mismatch(*saved))


def test_foreign_entry_is_named(saved):
    entries = saved[0].index.state_dict_metadata
    entries["extra.note"] = entries[NORM]
    assert "it holds extra.note, which no checkpoint of this trainer has" in str(mismatch(*saved))


def test_long_lists_are_cut(saved):
    entries = saved[0].index.state_dict_metadata
    for name in [name for name in entries if name.startswith("model.")]:
        del entries[name]
    assert " and 21 more" in str(mismatch(*saved))


def test_architecture_holds_what_shapes_do_not_tell(mesh: DeviceMesh):
    moe = architecture_of(setup_model(random_model(moe_architecture()), mesh).config)
    assert {"num_experts_per_tok", "norm_topk_prob", "rope_theta", "rms_norm_eps"} <= moe.keys()
    dense = architecture_of(setup_model(random_model(dense_architecture()), mesh).config)
    assert dense["type"] == "qwen3"
    assert "num_experts" not in dense
