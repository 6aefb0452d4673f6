"""Measured rates of GPUs, and the time of an optimizer step that they predict.

Owns the rates and nothing else; what a step does is counted in `pricing.py`.
"""

from dataclasses import dataclass

from trainer.errors import UserError
from trainer.optim.pricing import Price


@dataclass(frozen=True)
class Rates:
    """Measured rates of one GPU.

    Attributes:
        tflops: Of batched half-precision products at the shapes of experts.
        memory_gb_s: Read plus written, device memory.
        link_gb_s: Sent by one GPU in an all-to-all within a host.
    """

    tflops: float
    memory_gb_s: float
    link_gb_s: float


RATES = {
    # torch 2.11.0+cu130, 2026-12-01, scripts/bench/muon_step.py at 48 layers of Qwen3-30B-A3B:
    # Newton-Schulz with the updates that its last product makes, and the passes around it, as they
    # run within a step; their sum is 2 % under the step. The link is NVLink 4's nominal 450 GB/s at
    # the usual four fifths.
    "H200": Rates(tflops=570, memory_gb_s=3300, link_gb_s=360),
    # Same chip, HBM3 instead of HBM3e; not measured: scaled by the data sheets' ratio.
    "H100": Rates(tflops=570, memory_gb_s=2300, link_gb_s=360),
}


def predict_ms(price: Price, gpu: str) -> dict[str, float]:
    """Predict the milliseconds of each phase of a step, and their sum without overlap.

    Args:
        price: From `price_plan`.
        gpu: A name in `RATES`.

    Raises:
        UserError: no rates are known for that GPU.
    """
    if gpu not in RATES:
        raise UserError(f"gpu={gpu!r}: rates are known for {', '.join(RATES)}; choose one of them")
    rates = RATES[gpu]
    phases = {
        "newton_schulz_ms": price.flops / rates.tflops / 1e9,
        "elementwise_ms": price.memory_bytes / rates.memory_gb_s / 1e6,
        "exchange_ms": sum(price.sent_bytes.values()) / rates.link_gb_s / 1e6,
    }
    return {**phases, "total_ms": sum(phases.values())}
