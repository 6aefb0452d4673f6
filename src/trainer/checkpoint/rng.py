"""The random generators of a rank as uint8 tensors, so that no checkpoint needs a pickle.

Owns torch's (CPU and the current GPU), numpy's and Python's global generators. Generators that a
component seeds by itself belong to that component's state.
"""

import json
import random

import numpy as np
import torch
from torch import Tensor


def seed_all(seed: int) -> None:
    """Seed every generator that a checkpoint holds."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def rng_state() -> dict[str, Tensor]:
    """Return this rank's generators by name, each a uint8 vector on the CPU."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    numpy_state = [kind, np.asarray(keys).tolist(), position, has_gauss, gauss]
    states = {
        "torch": torch.get_rng_state(),
        "numpy": _to_tensor(numpy_state),
        "python": _to_tensor(random.getstate()),
    }
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_rng(states: dict[str, Tensor]) -> None:
    """Set the generators that `rng_state` returned; ones this machine lacks are left out."""
    torch.set_rng_state(states["torch"])
    kind, keys, position, has_gauss, gauss = _from_tensor(states["numpy"])
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, words, gauss_next = _from_tensor(states["python"])
    random.setstate((version, tuple(words), gauss_next))
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])


def _to_tensor(value: object) -> Tensor:
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


def _from_tensor(tensor: Tensor) -> list:
    return json.loads(bytes(tensor.tolist()))
