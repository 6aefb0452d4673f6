from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tests.support.meshes import one_rank_mesh
from tests.support.networks import dense_architecture, moe_architecture, packed_batch, random_model
from trainer.config.model import DenseArchitecture
from trainer.errors import UserError
from trainer.model.attention import choose_attention, document_ids, packed_mask
from trainer.model.setup import setup_model

IMPLEMENTATIONS = ["eager", "sdpa", "flex_attention"]


def positions(*lengths: int) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)


def test_documents_are_numbered_at_each_restart() -> None:
    continued = torch.tensor([[7, 8, 0, 0, 1, 0]])
    assert document_ids(continued).tolist() == [[0, 0, 1, 2, 2, 3]]


def test_auto_is_linear_in_memory_on_gpus() -> None:
    assert choose_attention("auto", "cuda") == "flex_attention"
    assert choose_attention("auto", "cpu") == "sdpa"
    assert choose_attention("eager", "cuda") == "eager"


def test_flex_attention_on_a_cpu_is_refused() -> None:
    with pytest.raises(UserError, match=r"model.attention='flex_attention' .* device 'cpu'"):
        choose_attention("flex_attention", "cpu")


@pytest.mark.parametrize(
    "lengths",
    [[512], [1] * 300, [128, 128, 128], [100, 200, 3, 209], [127, 1, 1, 255, 130], [40]],
    ids=["one", "ones", "aligned", "mixed", "edges", "short"],
)
def test_block_mask_equals_the_dense_mask(lengths: list[int]) -> None:
    position_ids = torch.cat([positions(*lengths), positions(*lengths[::-1])])
    dense = packed_mask(position_ids, "sdpa", torch.float32)
    block = packed_mask(position_ids, "flex_attention", torch.float32)
    assert isinstance(block, BlockMask)
    assert isinstance(dense, Tensor)
    num_blocks = -(-position_ids.shape[1] // 128)
    padding = num_blocks * 128 - position_ids.shape[1]
    # What lies beyond the end is computed by nobody: it neither asks for a block nor spoils one.
    wanted = blockwise(torch.nn.functional.pad(dense[:, 0], (0, padding, 0, padding)))
    allowed = blockwise(torch.nn.functional.pad(dense[:, 0], (0, padding, 0, padding), value=True))
    for partial_counts, partial_indices, whole_counts, whole_indices in (
        (block.kv_num_blocks, block.kv_indices, block.full_kv_num_blocks, block.full_kv_indices),
        (block.q_num_blocks, block.q_indices, block.full_q_num_blocks, block.full_q_indices),
    ):
        partial = listed_blocks(partial_counts, partial_indices)
        whole = listed_blocks(whole_counts, whole_indices)
        assert torch.equal(partial | whole, wanted.any(-1))
        assert not (partial & whole).any()
        assert torch.equal(whole & ~torch.eye(num_blocks, dtype=torch.bool), whole)
        assert allowed[whole].all()
        wanted, allowed = wanted.transpose(1, 2), allowed.transpose(1, 2)


def blockwise(mask_PSS: Tensor) -> Tensor:
    """Return `[P, query block, key block, entries]`."""
    return mask_PSS.unfold(1, 128, 128).unfold(2, 128, 128).flatten(3)


def listed_blocks(counts: Tensor | None, indices: Tensor | None) -> Tensor:
    """Return bool `[P, blocks, blocks]`, True where the first `counts` of `indices` point."""
    assert counts is not None
    assert indices is not None
    num_blocks = counts.shape[-1]
    is_listed = torch.arange(indices.shape[-1]) < counts[:, 0].unsqueeze(-1)
    listed = torch.zeros(len(counts), num_blocks, num_blocks, dtype=torch.bool)
    return listed.scatter(2, indices[:, 0].long(), is_listed)


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "architecture", [dense_architecture(), moe_architecture()], ids=["dense", "moe"]
)
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # inductor's own
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_a_packed_document_has_the_logits_it_has_alone(
    architecture: DenseArchitecture, attention: str
) -> None:
    lengths = [5, 1, 7, 3]
    input_ids, position_ids, _ = packed_batch([lengths])
    # FlexAttention's reference obeys the same mask as its kernel, which a CPU has not.
    with torch.compiler.set_stance("force_eager"), one_rank_mesh() as mesh:
        model = setup_model(random_model(architecture, attention="eager"), mesh).eval()
        model.computation = replace(model.computation, attention=attention)
        model.config._attn_implementation = attention
        packed = model(input_ids, position_ids=position_ids, logits=True)
        for document, alone_ids in zip(
            packed.split(lengths, dim=1), input_ids.split(lengths, dim=1), strict=True
        ):
            alone = model(alone_ids, position_ids=positions(alone_ids.shape[1]), logits=True)
            # fp32 softmax and products over other lengths.
            torch.testing.assert_close(document, alone, rtol=1e-5, atol=1e-5)
