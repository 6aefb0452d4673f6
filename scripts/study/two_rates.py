"""Pretraining with an AdamW that has a second rate, for what Muon would leave to AdamW.

    python -m scripts.study.two_rates 0.008 pretrain @ FILE --optim.type adamw …

For the study alone, which gives both optimizers the same freedom: the product's `adamw` has one
rate, its `muon` two (`lr` and `adamw_lr`). `trainer.loops.pretrain` in the order of its parts, with
an optimizer of two groups in the place of that of one before the first step.
"""

import sys
from collections.abc import Sequence

from torch import Tensor

from trainer.config import load_config
from trainer.config.pretrain import PretrainConfig
from trainer.data.text.setup import setup_pretrain_data
from trainer.data.tokenizer import choose_tokenizer
from trainer.loops.assembly import RunParts, open_run
from trainer.loops.pretrain import evaluate
from trainer.loops.supervised import train
from trainer.optim.groups import sort_parameters
from trainer.optim.torch_optimizers import AdamW
from trainer.parallel.world import open_world


def main(rest_lr: float, arguments: list[str]) -> None:
    """Run `trainer pretrain` with a rate of its own for embeddings, head and norms."""
    config, _ = load_config(PretrainConfig, arguments)
    with open_world(config.parallel) as world:
        tokenizer = choose_tokenizer(config.data.tokenizer, config.model.name)
        data = setup_pretrain_data(config.data, config.val, tokenizer, config.seed)
        parts = RunParts(config, world, tokenizer, "study", data.train, data.source_names)
        with open_run(parts) as (run, _):
            optimizer = run.step.optimizer
            assert isinstance(optimizer, AdamW)
            named_parameters = list(run.step.model.named_parameters())
            run.step.optimizer = split_rest(optimizer, named_parameters, rest_lr)
            run.step.base_lrs.append(rest_lr)
            train(run, config, data.train, lambda: evaluate(run, config, data))


def split_rest(
    optimizer: AdamW, named_parameters: Sequence[tuple[str, Tensor]], lr: float
) -> AdamW:
    """Return such an optimizer with what Muon leaves to AdamW in a param group of its own."""
    *groups, rest = sort_parameters(named_parameters)
    assert groups
    assert rest.name == "adamw"
    (settings,) = optimizer.param_groups
    matrices = [pair for group in groups for pair in group.named_parameters]
    return AdamW(
        [{**settings, "params": matrices}, {**settings, "params": rest.named_parameters, "lr": lr}]
    )


if __name__ == "__main__":
    assert sys.argv[2] == "pretrain"
    main(float(sys.argv[1]), sys.argv[3:])
