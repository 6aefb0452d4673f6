"""Experts split over ranks give the outputs and raw gradients of one process with all tokens."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from tests.support.spawn import run_ranks
from trainer.model.load_balancing import summarize_routing
from trainer.model.moe import MoEBlock, record_routing
from trainer.parallel import dispatch

pytestmark = pytest.mark.distributed

D, F, E, K = 16, 8, 8, 2
WORLD_SIZE = 4
EXPERT_NAMES = ("experts.gate_up_proj", "experts.down_proj")

TOKENS = {  # of each rank, in one pack
    "even": (5, 5, 5, 5),
    "uneven": (1, 7, 8, 9),
    "some ranks empty": (0, 6, 0, 3),
    "one token": (0, 0, 1, 0),
    "all ranks empty": (0, 0, 0, 0),
}
DTYPES = {
    "fp64 loop": (torch.float64, "loop"),
    "fp32 grouped": (torch.float32, "grouped_mm"),
    "bf16 grouped": (torch.bfloat16, "grouped_mm"),
}
CASES = list(itertools.product((1, 2, 4), DTYPES, TOKENS, (False, True)))
"""(ep, dtype and impl, tokens, is_skewed)"""


def make_block(dtype, impl, is_skewed):
    """The same on every rank; skewed: every token wants experts 0 and 1, so ranks starve."""
    generator = torch.Generator().manual_seed(0)
    block = MoEBlock(
        hidden_size=D,
        moe_intermediate_size=F,
        num_experts=E,
        num_experts_per_tok=K,
        norm_topk_prob=True,
        impl=impl,
    ).to(dtype)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    if is_skewed:
        with torch.no_grad():
            block.gate.weight.zero_()
            block.gate.weight[0, 0] = block.gate.weight[1, 0] = 5.0
    return block


def make_tokens(num_tokens, dtype):
    """All ranks' tokens in rank order, `[T, D]`, the first feature positive."""
    x_TD = torch.randn(num_tokens, D, generator=torch.Generator().manual_seed(1), dtype=dtype)
    x_TD[:, 0].abs_()
    return x_TD


def run_block(block, x_TD, is_checkpointed=False):
    """Return output, input gradient and every parameter's local gradient, as numpy arrays."""
    x_1TD = x_TD.unsqueeze(0).clone().requires_grad_()
    call = block
    if is_checkpointed:
        contexts = block.gate.checkpoint_contexts
        call = partial(checkpoint, block, use_reentrant=False, context_fn=contexts)
    upstream_1TD = x_1TD * 2 + 1  # a layer before the block, for gradients to reach
    with record_routing([block]) as records:
        output = call(upstream_1TD)
    load_balancing_P, _ = summarize_routing(records)
    (output.square().sum() + load_balancing_P.sum()).backward()
    tensors = {name: to_local(p.grad) for name, p in block.named_parameters()}
    tensors |= {"output": output.detach()[0], "x": x_1TD.grad[0]}
    return {
        name: tensor.to(torch.promote_types(tensor.dtype, torch.float32)).numpy()
        for name, tensor in tensors.items()
    }


def to_local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def split_experts(block, mesh):
    """Keep this rank's experts, as DTensors over the `ep` mesh."""
    for name, parameter in list(block.experts.named_parameters()):
        local = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
        local = DTensor.from_local(local, mesh, [Shard(0)])
        setattr(block.experts, name, nn.Parameter(local))
    block.experts.set_ep(mesh.get_group())


def run_all_cases():
    rank = dist.get_rank()
    meshes = {
        ep: init_device_mesh("cpu", (WORLD_SIZE // ep, ep), mesh_dim_names=("mod", "ep"))["ep"]
        for ep in (1, 2, 4)
    }
    results = {}
    for case in CASES:
        ep, dtype_name, tokens_name, is_skewed = case
        dtype, impl = DTYPES[dtype_name]
        counts = TOKENS[tokens_name]
        block = make_block(dtype, impl, is_skewed)
        split_experts(block, meshes[ep])
        x_TD = make_tokens(sum(counts), dtype).split(counts)[rank]
        results[case] = run_block(block, x_TD)
    return results, measure_dispatch(meshes[4]), run_under_fsdp()


def measure_dispatch(mesh):
    """Bytes this rank hands to each all-to-all of one forward and backward; host waits."""
    all_to_all_single, to_host = dist.all_to_all_single, dispatch._to_host
    sent_bytes, waits = [], []

    def counted_exchange(output, input, *args, **kwargs):
        sent_bytes.append(input.numel() * input.itemsize)
        return all_to_all_single(output, input, *args, **kwargs)

    def counted_wait(sizes):
        waits.append(1)
        return to_host(sizes)

    block = make_block(torch.float32, "grouped_mm", is_skewed=False)
    split_experts(block, mesh)
    dist.all_to_all_single, dispatch._to_host = counted_exchange, counted_wait
    try:
        run_block(block, make_tokens(6, torch.float32))
    finally:
        dist.all_to_all_single, dispatch._to_host = all_to_all_single, to_host
    return sent_bytes, len(waits)


def run_under_fsdp():
    """Experts over dp_shard_mod_ep x ep, recomputed, on one skewed and one plain batch."""
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("mod", "ep"))
    counts = TOKENS["uneven"]
    results = []
    for is_skewed in (False, True):
        block = make_block(torch.float32, "grouped_mm", is_skewed)
        split_experts(block, root["ep"])
        fully_shard(block.experts, mesh=root["mod"])
        block.experts.set_gradient_divide_factor(1.0)
        block.experts.set_force_sum_reduction_for_comms(True)
        x_TD = make_tokens(sum(counts), torch.float32).split(counts)[dist.get_rank()]
        results.append(run_block(block, x_TD, is_checkpointed=True))
    return results


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(WORLD_SIZE, run_all_cases)


def single_process(dtype, impl, counts, is_skewed):
    """Run every rank's tokens through one whole block; gradients add up over ranks."""
    block = make_block(dtype, impl, is_skewed)
    runs = []
    for x_TD in make_tokens(sum(counts), dtype).split(counts):
        runs.append(run_block(block, x_TD))  # parameter gradients accumulate
    return runs


def assert_close(actual, expected, dtype=torch.float32):
    """Sums in another order: a few roundings of the largest entry (entries cancel)."""
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    scale = np.abs(expected).max(initial=1.0)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("case", CASES, ids=lambda case: ", ".join(map(str, case)))
def test_outputs_and_gradients_equal_one_process(ranks, case):
    ep, dtype_name, tokens_name, is_skewed = case
    dtype, impl = DTYPES[dtype_name]
    expected = single_process(dtype, impl, TOKENS[tokens_name], is_skewed)
    actual = [results[case] for results, *_ in ranks]

    for rank in range(WORLD_SIZE):
        for name in ("output", "x"):
            assert_close(actual[rank][name], expected[rank][name], dtype)
    gate_grad = sum(run["gate.weight"] for run in actual)
    assert_close(gate_grad, expected[-1]["gate.weight"], dtype)
    for name in EXPERT_NAMES:
        of_ep_rank = [sum(run[name] for run in actual[i::ep]) for i in range(ep)]
        assert_close(np.concatenate(of_ep_rank), expected[-1][name], dtype)


def test_each_token_crosses_the_wire_once_per_choice_and_direction(ranks):
    counts_bytes, tokens_bytes = E * 8, 6 * K * D * 4
    for _, (sent_bytes, num_waits), *_ in ranks:
        assert sent_bytes[0] == counts_bytes
        assert sent_bytes[1] == tokens_bytes
        assert num_waits == 1
    # Forward: counts, tokens, results. Backward: results, tokens. Over all ranks each exchange
    # carries the same rows; one rank may serve more of them than it owns.
    for exchange in (1, 2, 3, 4):
        total = sum(sent_bytes[exchange] for _, (sent_bytes, _), *_ in ranks)
        assert total == WORLD_SIZE * tokens_bytes
    assert all(len(sent_bytes) == 5 for _, (sent_bytes, _), *_ in ranks)


@pytest.mark.parametrize("is_skewed", [False, True])
def test_experts_under_fsdp_with_recomputation_equal_one_process(ranks, is_skewed):
    expected = single_process(torch.float32, "grouped_mm", TOKENS["uneven"], is_skewed)
    actual = [fsdp[is_skewed] for *_, fsdp in ranks]
    for rank in range(WORLD_SIZE):
        for name in ("output", "x"):
            assert_close(actual[rank][name], expected[rank][name])
    for name in EXPERT_NAMES:
        # Rank (mod, ep) holds slice `mod` of the experts of `ep`.
        by_ep = [np.concatenate([actual[mod * 2 + ep][name] for mod in (0, 1)]) for ep in (0, 1)]
        assert_close(np.concatenate(by_ep), expected[-1][name])
