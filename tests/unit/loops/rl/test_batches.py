"""Packed rollouts: every stream lies at the position that predicts the token."""

import pytest
import torch

from tests.support.rl_configs import rl_config
from tests.support.rollouts import ROLLOUTS
from trainer.loops.rl.batches import pack_rollouts, policy_batches, policy_packs, trained_rollouts
from trainer.parallel.world import World


def batches_of(config, rank=0, size=1):
    packs = pack_rollouts(ROLLOUTS, config.data.seq_len)
    world = World(rank, size, rank, torch.device("cpu"))
    return policy_batches(packs, config, world, pad_id=0)


def test_packs_hold_every_rollout_once_and_fit(tmp_path):
    packs = pack_rollouts(ROLLOUTS, 64)
    assert sorted(rollout.group for pack in packs for rollout in pack) == [1, 2, 3, 4, 5]
    assert len(packs) == 3
    for pack in policy_packs(packs, rl_config(tmp_path)):
        assert pack.num_tokens <= 64


@pytest.mark.parametrize("size", [1, 2, 4])
def test_streams_lie_where_tokens_are_predicted(tmp_path, size):
    config = rl_config(tmp_path)
    seen = set()
    num_batches = set()
    for rank in range(size):
        batches = batches_of(config, rank, size)
        num_batches.add(len(batches))
        for batch in batches:
            packed = batch.packed
            for row, position in (packed.target_ids_PS != -100).nonzero().tolist():
                target = packed.target_ids_PS[row, position].item()
                rollout = ROLLOUTS[target // 100 - 1]
                index = target % 100 - len(rollout.prompt_ids)
                old = rollout.old_log_probs or rollout.log_probs
                assert packed.input_ids_PS[row, position] == target - 1
                assert batch.sampler_log_probs_PS[row, position] == rollout.log_probs[index]
                assert batch.old_log_probs_PS[row, position] == old[index]
                assert batch.advantages_PS[row, position] == rollout.advantage
                number = batch.completions_PS[row, position].item()
                flat = [r for pack in batch.packs for r in pack]
                assert flat[number] is rollout
                seen.add(target)
            untrained = packed.target_ids_PS == -100
            assert not batch.sampler_log_probs_PS[untrained].any()
            assert not packed.weights_PS[untrained].any()
    assert seen == {token for rollout in ROLLOUTS for token in rollout.ids}
    assert len(num_batches) == 1, "every rank runs as many forward passes"


def test_by_sequence_each_completion_weighs_one(tmp_path):
    config = rl_config(tmp_path, loss={"reduction": "sequence"})
    total = sum(batch.packed.weights_PS.sum().item() for batch in batches_of(config))
    assert total == pytest.approx(5.0)


def test_truncated_completions_are_left_out_if_masked(tmp_path):
    masked = trained_rollouts(ROLLOUTS, rl_config(tmp_path, rollout={"truncated": "mask"}))
    assert [rollout.group for rollout in masked] == [1, 2, 3, 5]
    assert trained_rollouts(ROLLOUTS, rl_config(tmp_path)) == ROLLOUTS


def test_nothing_to_train_on_is_one_empty_pack(tmp_path):
    config = rl_config(tmp_path)
    packs = pack_rollouts([], 64)
    (batch,) = policy_batches(packs, config, World(0, 1, 0, torch.device("cpu")), pad_id=0)
    assert packs == [()]
    assert not batch.packed.weights_PS.any()
