import pytest
import torch

from trainer.optim.stats import UpdateStats


def test_statistics_of_observed_groups_only() -> None:
    stack = torch.linalg.qr(torch.randn(3, 8, 4)).Q
    stack[1] *= 1.2
    stats = UpdateStats(["dense", "experts", "adamw"], torch.device("cpu"))
    stats.observe(1, stack[:1], 2.0)
    stats.observe(1, stack[1:], 2.0)
    stats.reduce(None)
    metrics = stats.read()
    assert set(metrics) == {"optim/update_rms/experts", "optim/update_spectral_norm/experts"}
    expected = 2 * float(stack.square().mean().sqrt())
    assert metrics["optim/update_rms/experts"] == pytest.approx(expected)
    assert metrics["optim/update_spectral_norm/experts"] == pytest.approx(2.4, rel=1e-3)
