import pytest

from tests.support.rl_configs import rl_config
from trainer.cli.planning.activations import Shape
from trainer.cli.planning.memory import StepMemory, step_memory
from trainer.cli.planning.parameters import describe_rank, global_shapes, local_numel
from trainer.cli.planning.rollouts import with_rollouts
from trainer.cli.planning.text import micro_batch_shape
from trainer.config import RLConfig
from trainer.model.architecture import inline_config
from trainer.parallel.mesh import MeshSizes


def both(config: RLConfig, world_size: int = 1) -> tuple[StepMemory, StepMemory]:
    """Return the memory of a step alone, and with rollouts."""
    assert config.model.architecture is not None
    hf_config = inline_config(config.model.architecture)
    specs = describe_rank(global_shapes(hf_config), MeshSizes(1, world_size, 1), 0)
    shape: Shape = micro_batch_shape(config, world_size)
    num_local = sum(local_numel(spec) for spec in specs)
    alone = step_memory(
        hf_config, specs, shape, num_local=num_local, state_bytes=0, optimizer_bytes=0
    )
    return alone, with_rollouts(alone, config, hf_config, specs, shape, world_size)


def test_a_reference_model_is_a_second_set_of_weights(tmp_path):
    alone, found = both(rl_config(tmp_path, loss={"type": "clip", "kl_coef": 0.1}))
    assert found.weights == 2 * alone.weights
    assert found.optimizer_peak - alone.optimizer_peak == alone.weights
    alone, found = both(rl_config(tmp_path))
    assert found.weights == alone.weights


def test_many_completions_at_once_take_more_than_a_step(tmp_path):
    rollout = {"num_prompts": 64, "num_samples": 8, "batch_size": 512}
    config = rl_config(tmp_path, rollout=rollout)
    _, found = both(config)
    assert found.worst.name.startswith("rollouts")
    # 512 completions of 64 positions, two heads of 8, two layers and one that grows, fp32.
    assert found.worst.activations == 512 * 64 * 2 * 2 * 8 * 3 * 4


def test_a_rank_decodes_no_more_than_its_share(tmp_path):
    rollout = {"num_prompts": 64, "num_samples": 8, "batch_size": 512}
    config = rl_config(tmp_path, rollout=rollout)
    _, one = both(config)
    _, four = both(config, world_size=4)
    assert four.worst.activations == pytest.approx(one.worst.activations / 4)
