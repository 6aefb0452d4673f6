from pathlib import Path

import pytest

from tests.support.rows import chat_row, write_jsonl
from tests.support.tokenizers import byte_tokenizer
from trainer.config.data import DataConfig, FilesSource, MixSource, ReasoningGymSource, ValConfig
from trainer.data.packing import Pack
from trainer.data.setup import setup_sft_data
from trainer.errors import UserError

TOKENIZER = byte_tokenizer()


def questions(packs: list[Pack]) -> set[str]:
    texts = [TOKENIZER.decode(d.ids) for pack in packs for d in pack.documents]
    return {text.split("user\n")[1].split("<|im_end|>")[0] for text in texts}


def files_config(path: Path, **fields: object) -> DataConfig:
    return DataConfig(source=FilesSource(path=str(path)), **{"seq_len": 64, **fields})


def test_a_fraction_is_held_out_whatever_the_seed(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [chat_row(f"q{i:02}", "a") for i in range(50)])
    splits = []
    for seed in (0, 1):
        data = setup_sft_data(files_config(path), ValConfig(fraction=0.2), TOKENIZER, seed)
        held_out = questions(data.validation_packs)
        trained = questions([pack for _ in range(12) for pack in data.train.next_packs(8)])
        assert held_out | trained == {f"q{i:02}" for i in range(50)}
        assert not held_out & trained
        assert len(held_out) == 10
        splits.append(held_out)
    assert splits[0] == splits[1]


def test_every_source_of_a_mix_holds_its_fraction_out(tmp_path: Path) -> None:
    paths = [
        write_jsonl(tmp_path / f"{name}.jsonl", [chat_row(f"{name}{i}", "a") for i in range(20)])
        for name in "ab"
    ]
    source = MixSource(sources=tuple(FilesSource(path=str(path)) for path in paths))
    config = DataConfig(source=source, seq_len=64)
    data = setup_sft_data(config, ValConfig(fraction=0.1), TOKENIZER, 0)
    assert sorted(q[0] for q in questions(data.validation_packs)) == ["a", "a", "b", "b"]


def test_no_question_of_a_validation_file_is_trained_on(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "t.jsonl", [chat_row(f"q{i}", "a") for i in range(20)])
    val = write_jsonl(tmp_path / "v.jsonl", [chat_row(f"q{i}", "other") for i in range(15, 25)])
    config = files_config(train, prefetch=False)
    data = setup_sft_data(config, ValConfig(source=FilesSource(path=str(val))), TOKENIZER, 0)
    trained = questions(data.train.next_packs(40))
    assert trained == {f"q{i}" for i in range(15)}
    assert data.train.counts["held_out"] > 0
    assert questions(data.validation_packs) == {f"q{i}" for i in range(15, 25)}


def test_a_held_out_question_is_not_trained_as_an_earlier_turn(tmp_path: Path) -> None:
    longer = {"messages": chat_row("q", "a")["messages"] + chat_row("r", "b")["messages"]}
    train = write_jsonl(tmp_path / "t.jsonl", [longer, chat_row("r", "b")])
    val = write_jsonl(tmp_path / "v.jsonl", [chat_row("q", "a")])
    settings = ValConfig(source=FilesSource(path=str(val)))
    data = setup_sft_data(files_config(train), settings, TOKENIZER, 0)
    assert questions(data.train.next_packs(8)) == {"r"}


def test_task_questions_are_held_out_by_text() -> None:
    """Two seeds of a task overlap: item i of one is item i - 1 of the next."""
    config = DataConfig(
        source=ReasoningGymSource(task="spell_backward", size=60, seed=1),
        seq_len=128,
        prefetch=False,
    )
    source = ReasoningGymSource(task="spell_backward", size=30, seed=2)
    data = setup_sft_data(config, ValConfig(source=source, num_generate=30), TOKENIZER, 0)
    trained = questions(data.train.next_packs(200))
    assert len(trained) >= 20
    assert not trained & {item.question for item in data.held_out}


def test_held_out_prompts_ask_for_their_answers(tmp_path: Path) -> None:
    rows = [chat_row(f"q{i}", "yes" if i % 4 else "no") for i in range(40)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    val = ValConfig(fraction=0.5, num_generate=20)
    data = setup_sft_data(files_config(path), val, TOKENIZER, 0)
    answers = {row["messages"][0]["content"]: row["messages"][1]["content"] for row in rows}
    for item in data.held_out:
        assert item.answer == answers[item.question]
        assert TOKENIZER.decode(item.prompt_ids) == (
            f"<|im_start|>user\n{item.question}<|im_end|>\n<|im_start|>assistant\n"
        )
    assert data.majority_rate == sum(item.answer == "yes" for item in data.held_out) / 20
    assert len({item.question for item in data.held_out}) == 20


def test_a_question_asked_twice_is_held_out_once(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "t.jsonl", [chat_row("p", "a")])
    val = write_jsonl(tmp_path / "v.jsonl", [chat_row("q", "a")] * 5)
    settings = ValConfig(source=FilesSource(path=str(val)), num_generate=2)
    with pytest.raises(UserError, match=r"val\.num_generate=2 exceeds the 1 distinct"):
        setup_sft_data(files_config(train), settings, TOKENIZER, 0)


def test_max_packs_limits_the_evaluation(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [chat_row(f"q{i}", "a") for i in range(50)])
    val = ValConfig(fraction=0.5, max_packs=2)
    assert len(setup_sft_data(files_config(path), val, TOKENIZER, 0).validation_packs) == 2


def test_validation_packs_every_row_once(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "t.jsonl", [chat_row("p", "a")])
    val = write_jsonl(tmp_path / "v.jsonl", [chat_row(f"q{i}", "a" * i) for i in range(1, 30)])
    settings = ValConfig(source=FilesSource(path=str(val)))
    packs = setup_sft_data(files_config(train), settings, TOKENIZER, 0).validation_packs
    assert sum(len(pack.documents) for pack in packs) == 29
    assert all(pack.num_tokens <= 64 for pack in packs)


def test_validation_cuts_samples_only_when_asked(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "t.jsonl", [chat_row("p", "a")])
    val = write_jsonl(tmp_path / "v.jsonl", [chat_row("q", "a" * 100)])
    settings = ValConfig(source=FilesSource(path=str(val)))
    with pytest.raises(UserError, match=r"v\.jsonl:1: \d+ tokens exceed data\.seq_len=64"):
        setup_sft_data(files_config(train), settings, TOKENIZER, 0)
    config = files_config(train, split_samples=True)
    packs = setup_sft_data(config, settings, TOKENIZER, 0).validation_packs
    assert [pack.num_tokens > 0 for pack in packs] == [True, True]
    with pytest.raises(UserError, match=r"val: none of the validation rows can be used"):
        setup_sft_data(files_config(train, overlong="drop"), settings, TOKENIZER, 0)


def test_without_validation_there_are_no_packs(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [chat_row("q", "a")])
    data = setup_sft_data(files_config(path), ValConfig(), TOKENIZER, 0)
    assert (data.validation_packs, data.held_out, data.majority_rate) == ([], (), None)
    assert data.description == "1 training rows from 1 source(s)"


def test_a_fraction_that_leaves_nothing_to_train_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [chat_row("q", "a")])
    with pytest.raises(UserError, match=r"val\.fraction=0\.1 holds out 1 of 1 rows"):
        setup_sft_data(files_config(path), ValConfig(fraction=0.1), TOKENIZER, 0)
