"""Forward passes that no backward follows: evaluation and generation."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import GenerationConfig, PreTrainedModel


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Run the block in eval mode without gradients, then give gathered weights back.

    What the block generates is sampled as it asks, whole: transformers would fill what it leaves
    open from the model's published defaults, a repetition penalty for example.

    FSDP leaves its outermost unit gathered after a forward, for a backward that does not come
    here; until it is resharded, the parameters that `named_parameters` shows are not the shards.

    Collective: none of its own.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), _without_published_sampling(model):
            yield
    finally:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        model.train(was_training)


@contextmanager
def _without_published_sampling(model: nn.Module) -> Iterator[None]:
    if not isinstance(model, PreTrainedModel):
        yield
        return
    published = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = published
