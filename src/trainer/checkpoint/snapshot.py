"""What one save will write, captured before anything touches the disk.

Owns the checks that come before a save: the model is finite, the JSON part is plain, there is room
for a copy on the host. Read `writer.py` for what happens to a snapshot.
"""

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch.optim import Optimizer
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from trainer.checkpoint.manifest import OptimizerRecord
from trainer.checkpoint.rng import rng_state
from trainer.checkpoint.shards import Shards
from trainer.checkpoint.state import all_shards, model_tensors, record_optimizer, view_optimizer
from trainer.model.finite import non_finite_names
from trainer.parallel.agreement import Ranks


@dataclass(frozen=True)
class Snapshot:
    """This rank's part of one checkpoint.

    Attributes:
        step: The step just finished.
        shards: Tensors; live ones, or copies on the host.
        optimizer: Class and groups.
        progress: The loop's own state, plain JSON values.
        model_config: For `config.json`.
        generation_config: For `generation_config.json`; None: of a model that has none.
    """

    step: int
    shards: Shards
    optimizer: OptimizerRecord
    progress: dict[str, Any]
    model_config: PretrainedConfig
    generation_config: GenerationConfig | None


def capture(
    step: int,
    model: PreTrainedModel,
    optimizer: Optimizer,
    progress: dict[str, Any],
    ranks: Ranks,
) -> Snapshot:
    """Take the state of a run as it is now; its tensors are still the live ones.

    Raises:
        RuntimeError: the model is not finite, or `progress` is not plain JSON; on every rank.

    Collective: all ranks.
    """
    names = non_finite_names(model_tensors(model))
    ranks.agree(f"{names[0]} holds values that are not finite" if names else None)
    view = view_optimizer(model, optimizer)
    shards = all_shards(model, view, rng_state(), ranks.rank)
    record = record_optimizer(optimizer, view)
    plain, error = {}, None
    try:
        json.dumps(asdict(record), allow_nan=False)
        # Through JSON, so that later changes stay out.
        plain = json.loads(json.dumps(progress, allow_nan=False))
    except (TypeError, ValueError) as failure:
        error = f"a value that is not plain JSON: {failure}"
    ranks.agree(error)
    return Snapshot(step, shards, record, plain, model.config, model.generation_config)


def copy_to_host(snapshot: Snapshot, ranks: Ranks) -> Snapshot:
    """Return the snapshot with tensors of its own in host memory.

    Raises:
        RuntimeError: some rank has no room; on every rank.

    Collective: all ranks.
    """
    copies: Shards = {}
    error = None
    try:
        copies = {key: shard.copy_to_host() for key, shard in snapshot.shards.items()}
    except (RuntimeError, MemoryError) as failure:
        error = f"no room for a copy on the host: {failure}"
    ranks.agree(error)
    return replace(snapshot, shards=copies)
