"""`trainer` whose AdamW has a second rate, for what Muon would leave to AdamW.

    python -m scripts.study.two_rates 0.008 pretrain @ FILE --optim.type adamw …

For the study alone, which gives both optimizers the same freedom: the product's `adamw` has one
rate, its `muon` two (`lr` and `adamw_lr`). So the optimizer is changed after it is built.
"""

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from trainer.cli.main import main
from trainer.loops import assembly
from trainer.optim.groups import sort_parameters
from trainer.optim.torch_optimizers import AdamW


def use_second_rate(lr: float) -> None:
    """Let AdamW optimizers that are built from now on take `lr` for embeddings, head and norms."""
    setup_optimizer = assembly.setup_optimizer

    def setup_with_two_rates(config: Any, named: Iterable[tuple[str, Tensor]], mesh: Any) -> Any:
        named_parameters = list(named)
        optimizer = setup_optimizer(config, named_parameters, mesh)
        assert isinstance(optimizer, AdamW)
        split_rest(optimizer, named_parameters, lr)
        return optimizer

    assembly.setup_optimizer = setup_with_two_rates


def split_rest(optimizer: AdamW, named_parameters: list[tuple[str, Tensor]], lr: float) -> None:
    """Move what Muon leaves to AdamW into a param group of its own."""
    rest = [p for _, p in sort_parameters(named_parameters)[-1].named_parameters]
    (group,) = optimizer.param_groups
    ours = {id(parameter) for parameter in rest}
    group["params"] = [p for p in group["params"] if id(p) not in ours]
    assert group["params"]
    assert rest
    optimizer.param_groups.append({**group, "params": rest, "lr": lr})


if __name__ == "__main__":
    use_second_rate(float(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
