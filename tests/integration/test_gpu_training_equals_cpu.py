"""Ten steps on GPUs: fp32 equals the CPU, every switch trains, ranks over NCCL agree."""

import numpy as np
import pytest
import torch

from tests.support.spawn import run_ranks
from tests.support.training import NUM_STEPS, SKIPPED_STEP, train_all

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FINITE = np.arange(NUM_STEPS) != SKIPPED_STEP


def losses(values):
    return values[FINITE, 2]


@pytest.fixture(scope="module")
def on_cpu():
    return run_ranks(1, train_all, [{}])[0]


@pytest.fixture(scope="module")
def on_gpu():
    return run_ranks(1, train_all, [{}], "cuda", backend="nccl", timeout_s=280)[0]


def assert_same(results, expected, tolerance):
    for (split, name), (values, weights, progress) in results.items():
        reference_values, reference_weights, reference_progress = expected["{}", name]
        case = f"{name} on {split}"
        np.testing.assert_allclose(
            values[FINITE], reference_values[FINITE], rtol=tolerance, atol=1e-6, err_msg=case
        )
        assert progress == reference_progress, case
        for parameter, reference in reference_weights.items():
            error = np.linalg.norm(weights[parameter] - reference) / np.linalg.norm(reference)
            assert error < tolerance, f"{case}: {parameter} differs by {error:.1e}"


def test_fp32_on_a_gpu_equals_the_cpu(on_cpu, on_gpu):
    # Flex attention and the GPU's products associate sums otherwise than the CPU's.
    assert_same(on_gpu, on_cpu, 1e-4)


@pytest.mark.parametrize(
    "model",
    [
        {"compute_dtype": "bfloat16"},
        {"activation_checkpointing": True},
        {"attention": "sdpa"},
        {"experts": "loop"},
        {"compile": True, "activation_checkpointing": True},
    ],
    ids=str,
)
def test_every_switch_trains_to_the_same_loss(on_gpu, model):
    results = run_ranks(1, train_with, model, backend="nccl", timeout_s=280)[0]
    tolerance = 2e-2 if model.get("compute_dtype") == "bfloat16" else 1e-4
    for key, (values, _, _) in results.items():
        np.testing.assert_allclose(losses(values), losses(on_gpu[key][0]), rtol=tolerance)


def train_with(model):
    return train_all([{}], "cuda", **model)


@pytest.mark.distributed
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_equal_one(on_gpu):
    splits = [dict(dp_shard=2), dict(dp_shard=2, ep=2), dict(dp_replicate=2, dp_shard=1)]
    results = run_ranks(2, train_all, splits, "cuda", backend="nccl", timeout_s=280)[0]
    assert_same(results, on_gpu, 1e-4)
