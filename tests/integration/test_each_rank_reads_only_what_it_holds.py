"""Published weights reach the right ranks, each byte no more often than it is held."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3MoeForCausalLM

from tests.support.networks import moe_architecture, packed_batch
from tests.support.spawn import run_ranks
from trainer.config.model import ModelConfig
from trainer.config.parallel import ParallelConfig
from trainer.errors import UserError
from trainer.model import setup_model
from trainer.model.architecture import inline_config
from trainer.model.inference import inference
from trainer.model.weights import load_weights_
from trainer.parallel.mesh import build_mesh

pytestmark = pytest.mark.distributed

NUM_RANKS = 4


def load_on_every_split(folder: Path) -> tuple[dict[int, int], dict[int, list[float]], str]:
    """Return bytes read and some logits by ep, and what a half-written file leads to."""
    config = ModelConfig(name=str(folder / "whole"), compute_dtype="float32")
    input_ids, position_ids, _ = packed_batch([[6, 2]])
    num_bytes, logits = {}, {}
    for ep in (1, 2, 4):
        mesh = build_mesh(ParallelConfig(ep=ep), "cpu")
        model = setup_model(config, mesh)
        with inference(model):
            logits[ep] = model(input_ids, position_ids=position_ids, logits=True)[0, -1].tolist()
        num_bytes[ep] = load_weights_(model, folder / "whole", copies={}).num_bytes
    # Only one rank sees the damage, as on a node of its own; all must hear of it.
    damaged = "damaged" if dist.get_rank() == 1 else "whole"
    with pytest.raises(UserError) as refused:
        setup_model(ModelConfig(name=str(folder / damaged)), mesh)
    return num_bytes, logits, str(refused.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    model = Qwen3MoeForCausalLM(inline_config(moe_architecture()))
    for name in ("whole", "damaged"):
        model.save_pretrained(tmp_path / name)
    file = tmp_path / "damaged" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    return tmp_path


def test_bytes_are_read_once_and_damage_is_shared(folder: Path) -> None:
    reference = Qwen3MoeForCausalLM.from_pretrained(folder / "whole")
    total_bytes = sum(p.nbytes for p in reference.parameters())
    input_ids, _, _ = packed_batch([[6, 2]])
    with torch.no_grad():
        expected = reference(input_ids[:, 6:], use_cache=False).logits[0, -1]
    by_rank = run_ranks(NUM_RANKS, load_on_every_split, folder)
    for ep in (1, 2, 4):
        read = [num_bytes[ep] for num_bytes, _, _ in by_rank]
        assert sum(read) == total_bytes
        # Shapes divide evenly by four.
        assert max(read) == total_bytes / NUM_RANKS
        for _, logits, _ in by_rank:
            # Experts' sums run in another order.
            torch.testing.assert_close(torch.tensor(logits[ep]), expected, rtol=1e-5, atol=2e-6)
    for _, _, message in by_rank:
        assert re.search(r"rank 1: .*model\.safetensors is damaged or half-written", message)
