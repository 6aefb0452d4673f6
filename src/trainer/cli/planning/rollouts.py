"""What an RL run holds beside a training step: rollouts under way and the reference model.

Owns the counting of both, as upper bounds: every completion is taken to reach the end of a pack.
What a training step takes is `memory.py`'s.
"""

from collections.abc import Sequence
from dataclasses import replace

from trainer.cli.planning.activations import Shape
from trainer.cli.planning.memory import Moment, StepMemory
from trainer.cli.planning.parameters import gather_units
from trainer.config import RLConfig
from trainer.model.architecture import QwenConfig
from trainer.optim.spec import ParameterSpec

_CHOICE_BYTES = 40
"""Of each logit, while a token is drawn: the logits in fp32 and fp64, their softmax, its integer
multiples and the sums of those."""


def with_rollouts(
    memory: StepMemory,
    config: RLConfig,
    hf_config: QwenConfig,
    specs: Sequence[ParameterSpec],
    shape: Shape,
    world_size: int,
) -> StepMemory:
    """Return a step's memory with what RL adds on the same rank.

    Args:
        memory: Of the training step alone.
        config: Of the run.
        hf_config: The network.
        specs: Its parameters on this rank.
        shape: The micro-batch.
        world_size: Ranks in all.
    """
    rollouts = _rollout_moment(config, hf_config, specs, shape, world_size)
    num_models = 2 if config.loss.kl_coef else 1
    return replace(
        memory,
        weights=num_models * memory.weights,
        worst=max(memory.worst, rollouts, key=lambda moment: moment.total),
    )


def _rollout_moment(
    config: RLConfig,
    hf_config: QwenConfig,
    specs: Sequence[ParameterSpec],
    shape: Shape,
    world_size: int,
) -> Moment:
    """Return the moment when a rank draws the last token of its fullest batch."""
    rollout = config.rollout
    head_dim, num_keys = hf_config.head_dim, hf_config.num_key_value_heads
    assert head_dim is not None, "transformers sets it when a config is made"
    assert num_keys is not None, "transformers sets it when a config is made"
    prompts_here = -(-rollout.num_prompts // world_size)
    prompts_at_once = min(prompts_here, max(1, rollout.batch_size // rollout.num_samples))
    num_completions = prompts_at_once * rollout.num_samples
    # Keys and values of every layer; those of the layer that grows by a token exist twice.
    cached = 2 * num_keys * head_dim * (hf_config.num_hidden_layers + 1) * shape.compute_bytes
    ends, layers = gather_units(specs)
    widest = max(layer.numel for layer in layers)
    return Moment(
        "rollouts (at most: completions that fill data.seq_len)",
        gradients=0,
        # A layer, its gathered form before it was cut up, and the next one on its way.
        gathered=(ends.numel + 3 * widest) * shape.compute_bytes,
        reduced=0,
        activations=num_completions * shape.seq_len * cached,
        passing=num_completions * hf_config.vocab_size * _CHOICE_BYTES,
    )
