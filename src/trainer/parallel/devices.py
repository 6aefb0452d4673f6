"""What GPUs can do: memory and matrix rate by name, for MFU and `trainer plan`."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GPU:
    """One GPU model.

    Attributes:
        name: As users type it (`--gpu h200`).
        match: Part of the name that the driver reports.
        memory_gib: Usable memory.
        bf16_tflops: Dense bf16 peak by the vendor's data sheet.
    """

    name: str
    match: str
    memory_gib: float
    bf16_tflops: float


GPUS = (
    GPU("h200", "H200", 139.0, 989.5),
    GPU("h100", "H100", 79.0, 989.5),
    GPU("a100", "A100", 79.0, 312.0),
    GPU("b200", "B200", 178.0, 2250.0),
)


def gpu_of(device: torch.device) -> GPU | None:
    """Return what is known of a device; None for a CPU or an unknown GPU."""
    if device.type != "cuda":
        return None
    reported = torch.cuda.get_device_name(device)
    return next((gpu for gpu in GPUS if gpu.match in reported), None)


def peak_flops(device: torch.device) -> float | None:
    """Return the dense bf16 peak in FLOP/s, where it is known."""
    gpu = gpu_of(device)
    return None if gpu is None else gpu.bf16_tflops * 1e12
