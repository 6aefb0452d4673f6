from dataclasses import replace

import pytest

from trainer.cli.planning.activations import Shape
from trainer.cli.planning.memory import StepMemory, step_memory
from trainer.cli.planning.parameters import describe_rank, global_shapes, local_numel
from trainer.config.model import MoEArchitecture
from trainer.model.architecture import inline_config
from trainer.parallel.mesh import MeshSizes

NETWORK = inline_config(
    MoEArchitecture(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
    )
)
SHAPE = Shape(
    num_packs=2,
    seq_len=64,
    compute_bytes=2,
    attention="flex_attention",
    logits_chunk_tokens=32,
    is_checkpointed=False,
    keeps_gathered=False,
    num_micro_batches=1,
    is_dispatched=False,
)
MANY_TOKENS = replace(SHAPE, num_packs=64)


def memory(shape: Shape = SHAPE) -> StepMemory:
    specs = describe_rank(global_shapes(NETWORK), MeshSizes(1, 4, 1), 0)
    num_local = sum(local_numel(spec) for spec in specs)
    return step_memory(
        NETWORK,
        specs,
        shape,
        num_local=num_local,
        state_bytes=4 * num_local,
        optimizer_bytes=1000,
    )


def test_the_optimizer_finds_weights_state_and_gradients():
    found = memory()
    assert found.weights == found.state == found.gradients
    assert found.optimizer_peak == 3 * found.weights + 1000
    assert found.peak == max(found.model_peak, found.optimizer_peak)


def test_a_peak_is_the_sum_of_what_exists_then():
    found = memory()
    worst = found.worst
    parts = worst.gradients + worst.gathered + worst.reduced + worst.activations + worst.passing
    assert found.model_peak == found.weights + found.state + parts


def test_micro_batches_after_the_first_find_gradients():
    one, two = memory(), memory(replace(SHAPE, num_micro_batches=2))
    assert two.model_peak - one.model_peak >= one.gradients / 2
    assert memory(replace(SHAPE, num_micro_batches=9)) == two


def test_recomputing_layers_saves_activations():
    kept = memory(MANY_TOKENS)
    recomputed = memory(replace(MANY_TOKENS, is_checkpointed=True))
    assert kept.worst.name == "the backward of layer 2"
    assert recomputed.worst.activations < 0.6 * kept.worst.activations


def test_weights_kept_gathered_are_counted():
    resharded, kept = memory(), memory(replace(SHAPE, keeps_gathered=True))
    assert kept.model_peak > resharded.model_peak


def test_rows_sent_to_other_ranks_pass_through_one_buffer_more():
    here, elsewhere = memory(MANY_TOKENS), memory(replace(MANY_TOKENS, is_dispatched=True))
    assert elsewhere.worst.passing == pytest.approx(here.worst.passing * 8 / 6)


def test_more_tokens_never_take_less():
    peaks = [memory(replace(SHAPE, num_packs=packs)).model_peak for packs in range(1, 40)]
    assert peaks == sorted(peaks)
