"""Which tensors a checkpoint holds, and how they go back into a live model and optimizer.

Keys are `model.<parameter>`, `optimizer.state.<parameter>.<key>` and `rng.<rank>.<generator>`:
what DCP itself writes for a model's and an optimizer's state dict, so that either reads the other's
tensors. Everything is matched by parameter name, never by position. Owns no files: see `shards.py`
for those, `match.py` for refusing what does not fit.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.checkpoint.manifest import OptimizerRecord
from trainer.checkpoint.shards import LocalShard, Shards

MODEL = "model."
OPTIMIZER = "optimizer.state."
RNG = "rng."


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, tied ones once."""
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    tied = dict(model.named_parameters(remove_duplicate=False))
    buffers = {name: value for name, value in model.state_dict().items() if name not in tied}
    return tensors | buffers


@dataclass(frozen=True)
class OptimizerView:
    """An optimizer's state by parameter name.

    Attributes:
        names: Parameter names by torch's index, which runs through the groups in order.
        state: Per parameter its state tensors by key; `trainer.optim` creates them all at once.
        groups: Settings of each group as `state_dict` gives them, with `names` for its parameters.
    """

    names: list[str]
    state: dict[str, dict[str, Tensor]]
    groups: list[dict[str, Any]]


def view_optimizer(model: nn.Module, optimizer: Optimizer) -> OptimizerView:
    """Return the optimizer's state by name; the tensors share memory with the live ones.

    Raises:
        RuntimeError: a parameter of the optimizer is not one of the model's, or a state value is
            not a tensor.
    """
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if unknown := [tuple(p.shape) for p in parameters if id(p) not in name_of]:
        raise RuntimeError(f"the optimizer holds parameters that are not the model's: {unknown}")
    names = [name_of[id(parameter)] for parameter in parameters]
    content = optimizer.state_dict()
    state = {names[index]: _tensors_of(entry) for index, entry in content["state"].items()}
    groups = [
        {**group, "names": [names[index] for index in group["params"]]}
        for group in content["param_groups"]
    ]
    return OptimizerView(names, state, groups)


def _tensors_of(entry: dict[str, Any]) -> dict[str, Tensor]:
    if others := sorted(key for key, value in entry.items() if not isinstance(value, Tensor)):
        raise RuntimeError(f"optimizer state {others} is not held in tensors")
    return entry


def record_optimizer(optimizer: Optimizer, view: OptimizerView) -> OptimizerRecord:
    """Return the JSON part of an optimizer: its class, its groups with host-side settings."""
    groups = [
        {
            "names": group["names"],
            "settings": {
                key: value.item() if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key not in ("params", "names")
            },
        }
        for group in view.groups
    ]
    return OptimizerRecord(type(optimizer).__name__, groups)


def all_shards(model: nn.Module, view: OptimizerView, rng: dict[str, Tensor], rank: int) -> Shards:
    """Return this rank's part of everything that a checkpoint holds."""
    tensors = {MODEL + name: tensor for name, tensor in model_tensors(model).items()}
    for name, entry in view.state.items():
        tensors |= {f"{OPTIMIZER}{name}.{key}": value for key, value in entry.items()}
    tensors |= {f"{RNG}{rank}.{name}": state for name, state in rng.items()}
    return {key: LocalShard.of(tensor) for key, tensor in tensors.items()}


def apply_optimizer(optimizer: Optimizer, view: OptimizerView, record: OptimizerRecord) -> None:
    """Hand loaded state to the optimizer: tensors and step counts, under the run's own settings.

    Group settings (learning rate and the like) stay what this run's config made them; of the
    checkpoint's groups only the host-side `step` is taken.
    """
    step_of = {
        name: group["settings"]["step"]
        for group in record.groups
        if "step" in group["settings"]
        for name in group["names"]
    }
    index_of = {name: index for index, name in enumerate(view.names)}
    groups = []
    for group in view.groups:
        kept = {key: value for key, value in group.items() if key != "names"}
        if "step" in kept and group["names"]:
            kept["step"] = step_of[group["names"][0]]
        groups.append(kept)
    state = {index_of[name]: entry for name, entry in view.state.items()}
    optimizer.load_state_dict({"state": state, "param_groups": groups})
