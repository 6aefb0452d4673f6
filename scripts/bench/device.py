"""Waiting for a device and asking what it holds; on a CPU these cost and tell nothing."""

import gc

import torch


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated(device: torch.device) -> int:
    """Return the bytes allocated now; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def reset_peak(device: torch.device) -> None:
    """Forget the peak so far."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> int:
    """Return the most bytes allocated since the last reset; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def release(device: torch.device) -> None:
    """Give cached memory back, so that variants do not inherit each other's fragments."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
