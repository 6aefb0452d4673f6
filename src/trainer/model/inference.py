"""Forward passes that no backward follows: evaluation and generation."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Run the block in eval mode without gradients, then give gathered weights back.

    FSDP leaves its outermost unit gathered after a forward, for a backward that does not come
    here; until it is resharded, the parameters that `named_parameters` shows are not the shards.

    Collective: none of its own.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        model.train(was_training)
