"""The network that a run starts with, whatever its weights lie in.

Owns the start from a checkpoint of another run: its weights alone, on any mesh, under a fresh
optimizer, schedule and data position. `trainer.model.setup` owns every other start and the
construction itself; `reader.py`, read next, what is read of a checkpoint.
"""

import logging
from functools import partial

from torch.distributed.device_mesh import DeviceMesh

from trainer.checkpoint.reader import OpenCheckpoint, load_weights_into, open_checkpoint
from trainer.config.model import ModelConfig
from trainer.errors import UserError
from trainer.model import setup_model
from trainer.model.causal_lm import CausalLM
from trainer.origin import find_checkpoint
from trainer.parallel.agreement import Ranks

logger = logging.getLogger(__name__)


def start_model(
    config: ModelConfig, mesh: DeviceMesh, *, seed: int = 0, reshard_after_forward: bool = True
) -> CausalLM:
    """Build the network as `setup_model` does, from a checkpoint too.

    Args:
        config: The `model` section; `name` may be a folder `checkpoints/step_N` of a run.
        mesh: From `trainer.parallel.build_mesh`; the checkpoint's may have been any other.
        seed: Of random weights.
        reshard_after_forward: `parallel.reshard_after_forward`.

    Raises:
        UserError: as `setup_model`; or the checkpoint is incomplete, damaged or unsafe, or of
            another network than `model.architecture`; on all ranks.
        RuntimeError: some rank could not read it; on all ranks.

    Collective: all ranks.
    """
    checkpoint = Ranks().together(lambda: _open(config))
    return setup_model(
        config,
        mesh,
        seed=seed,
        reshard_after_forward=reshard_after_forward,
        fill=None if checkpoint is None else partial(_fill_, checkpoint=checkpoint),
    )


def _open(config: ModelConfig) -> OpenCheckpoint | None:
    folder = None if config.name is None else find_checkpoint(config.name)
    if folder is None:
        return None
    if config.weights == "random":
        raise UserError(
            f"model.weights='random' while model.name={config.name!r} is a checkpoint, of whose "
            "weights nothing would be read: set model.weights = 'pretrained'"
        )
    return open_checkpoint(folder)


def _fill_(model: CausalLM, *, checkpoint: OpenCheckpoint) -> None:
    # DCP agrees over host objects: over gloo, whatever the default group's backend is.
    load_weights_into(checkpoint, model, Ranks.with_own_group())
    logger.info(
        "weights after step %d of %s; optimizer, schedule and data start anew",
        checkpoint.manifest.step,
        checkpoint.folder,
    )
