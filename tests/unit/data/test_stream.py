import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tokenizers import DROPS_EARLIER_REASONING, byte_tokenizer
from trainer.config.data import DataConfig, FilesSource
from trainer.data.encode import SampleEncoder
from trainer.data.packing import MASKED, Pack, micro_batches
from trainer.data.reader import RowReader
from trainer.data.rows import BadRow
from trainer.data.stream import SFTStream
from trainer.errors import UserError

TOKENIZER = byte_tokenizer()


class ListRows:
    """Rows from a list that counts how often it is read; None stands for a corrupt line."""

    def __init__(self, rows: list[dict | None]) -> None:
        self.rows = rows
        self.num_reads = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        self.num_reads += 1
        row = self.rows[index]
        if row is None:
            raise BadRow("not_json", "the line is not JSON")
        return row

    def where(self, index: int) -> str:
        return f"rows.jsonl:{index + 1}"


def text_rows(lengths: list[int], letter: str = "a") -> ListRows:
    """Rows whose samples have the given lengths (prompt of one byte, end token included)."""
    return ListRows([{"prompt": letter, "completion": "x" * (n - 2)} for n in lengths])


def make_stream(
    sources: list[Any],
    weights: list[float] | None = None,
    seed: int = 0,
    tokenizer: Any = TOKENIZER,
    **fields: Any,
) -> SFTStream:
    config = DataConfig(
        source=FilesSource(path="unused"),
        **{"seq_len": 32, "pack_lookahead": 4, **fields},
    )
    reader = RowReader(SampleEncoder(tokenizer, config), config)
    return SFTStream(sources, weights or [1.0] * len(sources), reader, config, seed)


def content(packs: list[Pack]) -> list[list[tuple]]:
    return [
        [(d.source, *d.ids.tolist(), *d.targets.tolist(), *d.weights.tolist()) for d in p.documents]
        for p in packs
    ]


def texts(packs: list[Pack]) -> list[str]:
    return [TOKENIZER.decode(d.ids) for pack in packs for d in pack.documents]


def test_the_order_depends_on_the_seed_alone() -> None:
    rows = [{"prompt": str(i), "completion": "x"} for i in range(50)]
    first, same, other = (make_stream([ListRows(rows)], seed=s).next_packs(20) for s in (1, 1, 2))
    assert content(first) == content(same) != content(other)


def test_batch_size_does_not_change_the_order() -> None:
    rows = ListRows([{"prompt": str(i), "completion": "x" * (i % 9 + 1)} for i in range(50)])
    one = make_stream([rows])
    assert content(make_stream([rows]).next_packs(12)) == content(
        [pack for _ in range(4) for pack in one.next_packs(3)]
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_step_trains_on_the_same_packs_on_any_number_of_ranks(world_size: int) -> None:
    rows = ListRows([{"prompt": str(i), "completion": "x" * (i % 9 + 1)} for i in range(50)])
    stream = make_stream([rows])
    whole = make_stream([rows]).next_packs(12)
    for start in (0, 6):
        packs = stream.next_packs(6)
        batches = [
            batch
            for rank in range(world_size)
            for batch in micro_batches(
                packs, rank=rank, world_size=world_size, micro_batch_size=2, seq_len=32, pad_id=0
            )
        ]
        dealt = [ids for b in batches for ids in b.input_ids_PS.tolist() if any(ids)]
        (expected,) = micro_batches(
            whole[start : start + 6],
            rank=0,
            world_size=1,
            micro_batch_size=6,
            seq_len=32,
            pad_id=0,
        )
        assert sorted(dealt) == sorted(expected.input_ids_PS.tolist())
        assert sum(b.num_trained for b in batches) == expected.num_trained


def test_an_epoch_gives_every_row_once() -> None:
    rows = ListRows([{"prompt": f"{i:02}", "completion": "x"} for i in range(40)])
    stream = make_stream([rows], pack_lookahead=1)
    seen = texts(stream.next_packs(5))  # 32 positions hold 8 samples of 4
    assert sorted(seen) == [f"{i:02}x<|im_end|>" for i in range(40)]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(3, 32), min_size=1, max_size=25),
    taken=st.integers(0, 30),
    lookahead=st.integers(1, 10),
    split=st.booleans(),
)
def test_resuming_anywhere_continues_bit_for_bit(
    lengths: list[int], taken: int, lookahead: int, split: bool
) -> None:
    """In the middle of a pack and across epochs included; the state survives JSON."""
    sources = [text_rows(lengths, "a"), text_rows(lengths[::-1], "b")]
    fields = {"weights": [2.0, 1.0], "pack_lookahead": lookahead, "split_samples": split}
    whole = make_stream(sources, **fields)
    whole.next_packs(taken)
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = make_stream(sources, **fields)
    resumed.load_state_dict(state)
    assert content(resumed.next_packs(10)) == content(whole.next_packs(10))
    assert resumed.state_dict() == whole.state_dict()


def test_resuming_late_reads_no_more_rows_than_resuming_early() -> None:
    num_reads = []
    for num_packs in (2, 500):
        stream = make_stream([text_rows([5, 9, 14] * 10)])
        stream.next_packs(num_packs)
        rows = text_rows([5, 9, 14] * 10)
        resumed = make_stream([rows])
        before = rows.num_reads
        resumed.load_state_dict(stream.state_dict())
        num_reads.append(rows.num_reads - before)
    assert max(num_reads) <= 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "seed: 1 in this run, 0 in the one"),
        ({"shuffle": False}, r"data\.shuffle: False in this run, True"),
        ({"sources": [text_rows([5])]}, r"rows in data\.source: \[1\] in this run, \[3\]"),
    ],
    ids=["seed", "shuffle", "rows"],
)
def test_a_position_of_other_data_is_refused(changes: dict, message: str) -> None:
    state = make_stream([text_rows([5, 5, 5])]).state_dict()
    with pytest.raises(UserError, match=message):
        make_stream(**{"sources": [text_rows([5, 5, 5])], **changes}).load_state_dict(state)


def test_a_half_built_pack_that_no_longer_exists_is_refused() -> None:
    stream = make_stream([text_rows([20] * 4)])
    stream.next_packs(1)
    changed = make_stream([text_rows([20] * 4)], seq_len=10, overlong="drop")
    with pytest.raises(UserError, match="no longer gives the sample"):
        changed.load_state_dict(stream.state_dict())


def test_a_mix_draws_in_proportion() -> None:
    stream = make_stream([text_rows([4]), text_rows([4], "b")], [3.0, 1.0], pack_lookahead=1)
    sources = [d.source for pack in stream.next_packs(10) for d in pack.documents]
    assert sources.count(0) == 60
    assert sources.count(1) == 20


BAD_ROWS = [
    (None, "not_json", "rows.jsonl:2: the line is not JSON"),
    ({"messages": [{"role": "user", "content": "q"}]}, "no_assistant_turn", "rows.jsonl:2: .*turn"),
]


@pytest.mark.parametrize(("bad", "reason", "message"), BAD_ROWS, ids=["corrupt", "no assistant"])
def test_a_bad_row_ends_the_run_or_is_counted(bad: dict | None, reason: str, message: str) -> None:
    rows = ListRows([{"prompt": "a", "completion": "b"}, bad])
    with pytest.raises(UserError, match=message):
        make_stream([rows], shuffle=False).next_packs(1)
    stream = make_stream([rows], shuffle=False, on_bad_row="skip", pack_lookahead=1)
    packs = stream.next_packs(1)
    assert set(texts(packs)) == {"ab<|im_end|>"}
    assert stream.counts == {"rows": 21, "samples": 11, f"bad_rows/{reason}": 10}


def test_an_overlong_sample_is_an_error_by_default() -> None:
    with pytest.raises(UserError, match=r"rows.jsonl:1: 33 tokens exceed data\.seq_len=32"):
        make_stream([text_rows([33])]).next_packs(1)


def test_overlong_samples_are_dropped_when_asked() -> None:
    stream = make_stream([text_rows([33, 32])], overlong="drop")
    assert [pack.num_tokens for pack in stream.next_packs(3)] == [32] * 3
    assert stream.counts["overlong/dropped"] >= 3


def test_overlong_samples_are_truncated_when_asked() -> None:
    stream = make_stream([text_rows([40])], overlong="truncate", pack_lookahead=1)
    (pack,) = stream.next_packs(1)
    assert pack.documents[0].ids.tolist() == [ord("a"), *[ord("x")] * 31]
    assert pack.documents[0].targets[-1] == MASKED
    assert stream.counts["overlong/truncated"] == stream.counts["samples"]


def test_a_sample_truncated_before_its_answer_is_left_out_and_counted() -> None:
    rows = ListRows([{"prompt": "a" * 40, "completion": "b"}, {"prompt": "a", "completion": "b"}])
    stream = make_stream([rows], overlong="truncate", shuffle=False)
    assert set(texts(stream.next_packs(1))) == {"ab<|im_end|>"}
    assert stream.counts["nothing_trained"] > 0


def test_rows_of_weight_zero_are_left_out() -> None:
    no_weight = {"prompt": "a", "completion": "b", "weight": 0}
    rows = ListRows([no_weight, {"prompt": "a", "completion": "c"}])
    assert set(texts(make_stream([rows]).next_packs(1))) == {"ac<|im_end|>"}


def test_data_without_a_usable_row_is_an_error() -> None:
    message = (
        r"none of its 2 rows can be used \(.*:1: 33 tokens exceed data.seq_len=32 and data.over"
    )
    with pytest.raises(UserError, match=message):
        make_stream([text_rows([33, 40])], overlong="drop", shuffle=False).next_packs(1)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "a", "completion": "b", "weight": 0}, "its weight is 0"),
        ({"prompt": "a" * 40, "completion": "b"}, "lies behind data.seq_len=32"),
    ],
    ids=["no weight", "answer cut off"],
)
def test_rows_without_anything_to_train_say_why(row: dict, why: str) -> None:
    with pytest.raises(UserError, match=why):
        make_stream([ListRows([row])], overlong="truncate").next_packs(1)


def test_split_samples_fill_packs_wholly_and_lose_no_target() -> None:
    stream = make_stream([text_rows([70])], split_samples=True)
    packs = stream.next_packs(35)  # 35 packs of 32 positions hold 16 samples of 70
    assert [pack.num_tokens for pack in packs] == [32] * 35
    assert sum(pack.num_trained for pack in packs) == 16 * 69


def test_each_turn_of_a_rewritten_conversation_is_trained_once() -> None:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "b"},
    ]
    tokenizer = byte_tokenizer(DROPS_EARLIER_REASONING)
    stream = make_stream(
        [ListRows([{"messages": messages}])], seq_len=128, tokenizer=tokenizer, pack_lookahead=1
    )
    documents = [d for pack in stream.next_packs(4) for d in pack.documents]
    assert 1 in [part for _, _, part, _ in stream.state_dict()["pending"]]
    resumed = make_stream(
        [ListRows([{"messages": messages}])], seq_len=128, tokenizer=tokenizer, pack_lookahead=1
    )
    resumed.load_state_dict(stream.state_dict())
    assert content(resumed.next_packs(3)) == content(stream.next_packs(3))
    answers = [tokenizer.decode(d.targets[d.targets != MASKED]) for d in documents]
    assert stream.counts["samples"] == 2 * stream.counts["rows"]
    assert {answer[-11] for answer in answers} == {"a", "b"}
