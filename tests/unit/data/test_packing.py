import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.packing import (
    MASKED,
    Document,
    Pack,
    Sample,
    collate,
    deal,
    micro_batches,
    pack_fill,
    take_best_fit,
)


def document(ids: list[int], weights: list[float]) -> Document:
    return Document.from_sample(Sample(np.array(ids), np.array(weights, dtype=np.float32)))


def test_targets_are_shifted_inside_the_document() -> None:
    shifted = document([10, 11, 12, 13], [1, 0, 0.5, 1])
    assert shifted.targets.tolist() == [MASKED, 12, 13, MASKED]
    assert shifted.weights.tolist() == [0, 0.5, 1, 0]


def test_a_piece_keeps_the_target_across_the_cut() -> None:
    first = document([10, 11, 12, 13], [0, 1, 1, 1]).piece(0, 2)
    assert (first.ids.tolist(), first.targets.tolist()) == ([10, 11], [11, 12])


def test_collate_restarts_positions_and_never_trains_across_documents() -> None:
    packs = [Pack((document([1, 2, 3], [1, 1, 1]), document([4, 5], [1, 2])))]
    batch = collate(packs, seq_len=8, pad_id=9, num_packs=2)
    assert batch.input_ids_PS.tolist() == [[1, 2, 3, 4, 5, 9, 9, 9], [9] * 8]
    assert batch.position_ids_PS.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2], list(range(8))]
    assert batch.target_ids_PS.tolist() == [[2, 3, -100, 5, -100, -100, -100, -100], [-100] * 8]
    assert batch.weights_PS.tolist() == [[1, 1, 0, 2, 0, 0, 0, 0], [0] * 8]
    assert batch.target_rows_N.tolist() == [0, 1, 3]
    assert (batch.num_tokens, batch.num_trained) == (5, 3)
    assert batch.input_ids_PS.dtype == batch.target_ids_PS.dtype == torch.int64
    assert batch.weights_PS.dtype == torch.float32


def test_dealing_gives_every_pack_to_one_rank() -> None:
    packs = [Pack((document([i, i], [1, 1]),)) for i in range(7)]
    dealt = [deal(packs, rank, 3) for rank in range(3)]
    assert [p for i in range(3) for own in dealt for p in own[i : i + 1]] == packs


def test_every_rank_gets_equally_many_micro_batches() -> None:
    packs = [Pack((document([i, i], [1, 1]),)) for i in range(5)]
    dealt = [
        micro_batches(packs, rank=r, world_size=4, micro_batch_size=2, seq_len=2, pad_id=0)
        for r in range(4)
    ]
    assert {len(batches) for batches in dealt} == {1}
    assert {b.input_ids_PS.shape for batches in dealt for b in batches} == {(2, 2)}
    assert [sum(b.num_tokens for b in batches) for batches in dealt] == [4, 2, 2, 2]


def test_no_micro_batch_is_larger_than_a_ranks_share() -> None:
    packs = [Pack((document([i, i], [1, 1]),)) for i in range(3)]
    sizes = {"rank": 0, "world_size": 2, "seq_len": 2, "pad_id": 0}
    (batch,) = micro_batches(packs, micro_batch_size=10**12, **sizes)
    assert batch.input_ids_PS.shape == (2, 2)


def fill_all(lengths: list[int], seq_len: int, lookahead: int) -> list[list[list[int]]]:
    """Pack items `[index] * length` until none is left."""
    waiting = iter([[index] * length for index, length in enumerate(lengths)])
    pending: list[list[int]] = []

    def refill() -> None:
        while len(pending) < lookahead and (item := next(waiting, None)) is not None:
            pending.append(item)

    packs = []
    while taken := take_best_fit(pending, refill, seq_len):
        packs.append(taken)
    return packs


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=200), st.integers(1, 20))
def test_packing_loses_splits_and_overfills_nothing(lengths: list[int], lookahead: int) -> None:
    packs = fill_all(lengths, 50, lookahead)
    taken = sorted(item[0] for pack in packs for item in pack)
    assert taken == list(range(len(lengths)))
    assert all(len(item) == lengths[item[0]] for pack in packs for item in pack)
    assert all(sum(map(len, pack)) <= 50 for pack in packs)


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=200), st.integers(1, 20))
def test_no_item_waits_longer_than_the_lookahead(lengths: list[int], lookahead: int) -> None:
    packs = fill_all(lengths, 50, lookahead)
    for number, pack in enumerate(packs):
        assert min(item[0] for item in pack) <= number * 50 + lookahead
        oldest = pack[0][0]
        later = [item[0] for rest in packs[number + 1 :] for item in rest]
        assert all(oldest < index for index in later)


def test_short_samples_fill_packs_to_95_percent() -> None:
    lengths = np.random.default_rng(0).integers(20, 120, size=2000).tolist()
    packs = fill_all(lengths, 512, 64)[:-5]
    assert sum(len(item) for pack in packs for item in pack) / (512 * len(packs)) > 0.99


def test_pack_fill_counts_tokens_over_positions() -> None:
    packs = [Pack((document([1, 2, 3], [1, 1, 1]),)), Pack()]
    assert pack_fill(packs, 4) == 3 / 8
