"""A checkpoint of any split of the ranks loads, bit for bit, under any other."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from tests.support.meshes import one_rank_mesh
from tests.support.networks import moe_architecture, random_model
from tests.support.one_step import train_step
from tests.support.spawn import run_ranks
from trainer.checkpoint import CheckpointStore
from trainer.checkpoint.shards import LocalShard
from trainer.checkpoint.state import MODEL, all_shards, view_optimizer
from trainer.config.optim import MuonConfig
from trainer.config.parallel import ParallelConfig
from trainer.model import setup_model
from trainer.model.export import save_hf_weights
from trainer.model.hf_files import GIB
from trainer.model.hf_names import published_pieces
from trainer.optim import setup_optimizer
from trainer.parallel import build_mesh

pytestmark = pytest.mark.distributed

# Six experts: neither 4 shards nor, on ep = 2, 2 shards of 3 split evenly.
MODEL_CONFIG = random_model(moe_architecture(num_experts=6, tie_word_embeddings=True))
STACKED = MuonConfig(ns_dtype="float32")
PER_MATRIX = MuonConfig(ns_dtype="float32", impl="per_matrix")
SPLITS = {
    "fsdp": (ParallelConfig(dp_shard=4), STACKED),
    "fsdp-ep": (ParallelConfig(dp_shard=4, ep=2), PER_MATRIX),
    "hsdp": (ParallelConfig(dp_replicate=2, dp_shard=2), STACKED),
    "hsdp-ep": (ParallelConfig(dp_replicate=2, dp_shard=2, ep=2), PER_MATRIX),
}


def build(split: str | None, seed: int) -> tuple[PreTrainedModel, Optimizer]:
    parallel, optim = (ParallelConfig(), STACKED) if split is None else SPLITS[split]
    mesh = build_mesh(parallel, "cpu")
    model = setup_model(MODEL_CONFIG, mesh, seed=seed)
    return model, setup_optimizer(optim, model.named_parameters(), mesh)


def shards_of(model: PreTrainedModel, optimizer: Optimizer) -> dict[str, LocalShard]:
    return all_shards(model, view_optimizer(model, optimizer), {}, rank=0)


def differing(shards: dict[str, LocalShard], expected: dict[str, Tensor]) -> list[str]:
    assert shards.keys() == expected.keys()
    return [
        key
        for key, shard in shards.items()
        if not torch.equal(shard.local, expected[key][shard.box.slices])
    ]


def largest_error(shards: dict[str, LocalShard], expected: dict[str, Tensor]) -> float:
    """Return the largest error of a weight's shard, relative to the whole weight's norm."""
    return max(
        float((shard.local - expected[key][shard.box.slices]).norm() / expected[key].norm())
        for key, shard in shards.items()
        if key.startswith(MODEL)
    )


def on_four_ranks(folder: Path) -> dict[str, dict]:
    """Load the one-rank checkpoint under every split, save it again, and load those crosswise."""
    expected = torch.load(folder / "expected.pt")
    after_step = torch.load(folder / "after_step.pt")
    found: dict[str, dict] = {}
    origins = ["one-rank"]
    for split in SPLITS:
        model, optimizer = build(split, seed=1)
        wrong = {}
        for origin in origins:
            progress = CheckpointStore(folder / origin).load(2, model, optimizer)
            wrong[origin] = differing(shards_of(model, optimizer), expected)
            assert progress == {"tokens": 11}
        CheckpointStore(folder / split).save(2, model, optimizer, {"tokens": 11})
        save_hf_weights(model, None, folder / f"{split}-hf", "float32", 3e4 / GIB)
        train_step(model, optimizer, seed=2)
        error = largest_error(shards_of(model, optimizer), after_step)
        found[split] = {"wrong": wrong, "error": error}
        origins.append(split)
    return found


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, dict]]]:
    folder = tmp_path_factory.mktemp("reshards")
    with one_rank_mesh():
        model, optimizer = build(None, seed=0)
        for seed in range(2):
            train_step(model, optimizer, seed=seed)
        CheckpointStore(folder / "one-rank").save(2, model, optimizer, {"tokens": 11})
        for name in ("expected", "after_step"):
            whole = {key: s.local.clone() for key, s in shards_of(model, optimizer).items()}
            torch.save(whole, folder / f"{name}.pt")
            train_step(model, optimizer, seed=2)
    return folder, run_ranks(4, on_four_ranks, folder)


@pytest.mark.parametrize("split", SPLITS)
def test_every_split_loads_every_other_bit_for_bit(outcome, split: str):
    _, ranks = outcome
    for found in ranks:
        assert found[split]["wrong"] == {origin: [] for origin in found[split]["wrong"]}


@pytest.mark.parametrize("split", SPLITS)
def test_training_goes_on_to_the_same_weights(outcome, split: str):
    # fp32 sums over four ranks are associated otherwise than in one process.
    assert max(found[split]["error"] for found in outcome[1]) < 1e-5


@pytest.mark.parametrize("split", SPLITS)
def test_one_rank_loads_what_four_saved(outcome, split: str):
    folder, _ = outcome
    with one_rank_mesh():
        model, optimizer = build(None, seed=1)
        CheckpointStore(folder / split).load(2, model, optimizer)
        assert differing(shards_of(model, optimizer), torch.load(folder / "expected.pt")) == []


@pytest.mark.parametrize("split", SPLITS)
def test_weights_written_by_any_split_are_the_whole_model(outcome, split: str):
    folder, _ = outcome
    expected = torch.load(folder / "expected.pt")
    paths = list((folder / f"{split}-hf").glob("*.safetensors"))
    assert len(paths) > 1
    stored = {name: tensor for path in paths for name, tensor in load_file(path).items()}
    for key, whole in expected.items():
        if key.startswith(MODEL):
            for piece in published_pieces(key.removeprefix(MODEL), tuple(whole.shape)):
                assert torch.equal(stored.pop(piece.name), piece.cut(whole)), piece.name
    assert stored == {}
