"""Prompts: rows in several forms, held-out ones apart, a position that continues."""

import json
import sys
import types

import pytest

from tests.support.rl_configs import PART_ASCII, prompts_file, rl_config
from trainer.data import build_byte_tokenizer
from trainer.errors import UserError
from trainer.loops.rl.prompts import setup_prompts

TOKENIZER = build_byte_tokenizer()
EXACT = {"rewards": [{"type": "exact_match"}]}
NO_VAL = {"val": {"source": None}}


def file_config(folder, rows, **changes):
    env = EXACT | {"source": prompts_file(folder, rows), "shuffle": False} | changes.pop("env", {})
    return rl_config(folder, env=env, **(NO_VAL | changes))


def text_of(prompt):
    return TOKENIZER.decode(list(prompt.ids))


FORMS = {
    "question": {"question": "2+2?", "answer": 4},
    "turns and answer": {"prompt": [{"role": "user", "content": "2+2?"}], "answer": "4"},
    "messages and answer": {"messages": [{"role": "user", "content": "2+2?"}], "answer": "4"},
    "supervised messages": {
        "messages": [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "4"},
        ]
    },
}


@pytest.mark.parametrize("row", FORMS.values(), ids=FORMS.keys())
def test_conversations_are_prompted_with_the_chat_template(row, tmp_path):
    (prompt,) = setup_prompts(file_config(tmp_path, [row]), TOKENIZER).train.next_prompts(1)
    assert text_of(prompt) == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert (prompt.question, prompt.reference) == ("2+2?", "4")
    assert prompt.where.endswith("prompts.jsonl:1")


@pytest.mark.parametrize(
    "row", [{"prompt": "2+2=", "answer": 4}, {"prompt": "2+2=", "completion": "4"}]
)
def test_text_is_prompted_as_it_is(row, tmp_path):
    (prompt,) = setup_prompts(file_config(tmp_path, [row]), TOKENIZER).train.next_prompts(1)
    assert (text_of(prompt), prompt.reference) == ("2+2=", "4")


def test_a_function_scores_prompts_without_answers(tmp_path):
    config = file_config(tmp_path, [{"prompt": "2+2="}], env={"rewards": [PART_ASCII]})
    (prompt,) = setup_prompts(config, TOKENIZER).train.next_prompts(1)
    assert (text_of(prompt), prompt.reference) == ("2+2=", "")


def test_other_fields_reach_the_rewards(tmp_path):
    row = {"question": "2+2?", "answer": 4, "level": 3, "score_task": "mine"}
    (prompt,) = setup_prompts(file_config(tmp_path, [row]), TOKENIZER).train.next_prompts(1)
    assert (prompt.row["level"], prompt.row["score_task"]) == (3, "mine")
    assert prompt.score_task is None


def test_a_system_turn_is_added_where_there_is_none(tmp_path):
    own = {
        "messages": [{"role": "system", "content": "mine"}, {"role": "user", "content": "b"}],
        "answer": "1",
    }
    rows = [{"question": "a", "answer": "1"}, own]
    config = file_config(tmp_path, rows, env={"system": "be brief"})
    first, second = setup_prompts(config, TOKENIZER).train.next_prompts(2)
    assert text_of(first).startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\na")
    assert text_of(second).startswith("<|im_start|>system\nmine<|im_end|>")


def test_a_row_without_an_answer_is_refused_by_place_or_skipped(tmp_path):
    rows = [{"question": "a"}, {"question": "b", "answer": "1"}]
    config = file_config(tmp_path, rows)
    with pytest.raises(UserError, match=r"prompts\.jsonl:1: .*'answer'.*env\.on_bad_row = 'skip'"):
        setup_prompts(config, TOKENIZER).train.next_prompts(1)
    config = file_config(tmp_path, rows, env={"on_bad_row": "skip"})
    stream = setup_prompts(config, TOKENIZER).train
    prompts = stream.next_prompts(2)
    assert [prompt.question for prompt in prompts] == ["b", "b"]
    assert stream.counts == {"bad_rows/no_answer": 2}
    again = setup_prompts(config, TOKENIZER).train
    again.load_state_dict(stream.state_dict())
    assert again.counts == stream.counts


BAD_ROWS = {
    "an answer of several": ({"question": "a", "answer": ["1", "one"]}, "answer is a list"),
    "an answer in a table": ({"question": "a", "answer": {"text": "1"}}, "answer is a dict"),
    "half a surrogate": ({"question": "a", "answer": "\ud800"}, "half a surrogate pair"),
    "turns that are text": ({"messages": "a", "answer": "1"}, "give a list of turns, or the text"),
    "no turns": ({"prompt": [], "answer": "1"}, "there is no turn to answer"),
    "an answer to nothing": ({"messages": [{"role": "assistant", "content": "1"}]}, "no turn to"),
    "a question of turns": ({"question": ["a"], "answer": "1"}, r"question=\['a'\] is a list"),
    "a question in figures": ({"question": 5, "answer": "1"}, "question=5 is a int: give text"),
    "no prompt": (
        {"text": "a", "answer": "1"},
        r"has the fields \['answer', 'text'\]: it needs a 'q",
    ),
    "an empty prompt": ({"prompt": "", "answer": "1"}, "prompt='' gives the model nothing"),
}


@pytest.mark.parametrize(("row", "message"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_row_that_no_one_could_answer_or_score_is_refused(row, message, tmp_path):
    with pytest.raises(UserError, match=rf"prompts\.jsonl:1: .*{message}"):
        setup_prompts(file_config(tmp_path, [row]), TOKENIZER).train.next_prompts(1)


def test_a_prompt_that_leaves_no_room_is_refused_or_dropped(tmp_path):
    rows = [{"question": "a" * 60, "answer": "1"}, {"question": "b", "answer": "1"}]
    message = r"prompts\.jsonl:1: a prompt of \d+ tokens.*rollout\.max_new_tokens=6 .*seq_len=64"
    with pytest.raises(UserError, match=message):
        setup_prompts(file_config(tmp_path, rows), TOKENIZER).train.next_prompts(1)
    config = file_config(tmp_path, rows, data={"overlong": "drop"})
    (prompt,) = setup_prompts(config, TOKENIZER).train.next_prompts(1)
    assert prompt.question == "b"


def test_a_source_without_a_usable_prompt_is_refused(tmp_path):
    config = file_config(tmp_path, [{"question": "a"}], env={"on_bad_row": "skip"})
    with pytest.raises(UserError, match=r"none of its 1 rows can be used.*no_answer"):
        setup_prompts(config, TOKENIZER).train.next_prompts(1)


def test_tasks_bring_their_own_scoring(tmp_path):
    prompts = setup_prompts(rl_config(tmp_path), TOKENIZER)
    (prompt,) = prompts.train.next_prompts(1)
    assert prompt.score_task(prompt.reference) == 1.0
    assert 0 < prompt.score_task(prompt.reference[:-1]) < 1
    assert prompt.row["metadata"]["word"] == prompt.reference[::-1]


def test_a_task_that_scores_without_answers_gives_prompts(tmp_path):
    source = {"type": "reasoning_gym", "task": "rush_hour", "size": 3}
    changes = {"data": {"seq_len": 2048}, "val": {"source": None}}
    config = rl_config(tmp_path, env={"source": source}, **changes)
    (prompt,) = setup_prompts(config, TOKENIZER).train.next_prompts(1)
    assert prompt.reference == ""
    assert prompt.score_task("no move") < 0.1
    config = rl_config(tmp_path, env=EXACT | {"source": source}, **changes)
    with pytest.raises(UserError, match=r"rush_hour\(seed=0\): item \d: .*gives no answer"):
        setup_prompts(config, TOKENIZER).train.next_prompts(1)


def test_no_held_out_question_is_trained_on(tmp_path):
    config = rl_config(tmp_path, val={"source": None, "fraction": 0.3, "num_prompts": 4})
    prompts = setup_prompts(config, TOKENIZER)
    trained = {prompt.key for prompt in prompts.train.next_prompts(200)}
    assert len(prompts.held_out) == 4
    assert len(trained) > 20
    assert trained.isdisjoint({prompt.key for prompt in prompts.held_out})


def test_a_question_in_both_sources_is_held_out(tmp_path):
    rows = [{"question": q, "answer": "1"} for q in "abcd"]
    source = prompts_file(tmp_path / "val", rows[:2])
    config = file_config(tmp_path, rows, val={"source": source})
    prompts = setup_prompts(config, TOKENIZER)
    assert {prompt.question for prompt in prompts.train.next_prompts(6)} == {"c", "d"}
    assert [prompt.question for prompt in prompts.held_out] == ["a", "b"]


def test_the_stream_continues_from_a_position_and_shuffles_by_seed(tmp_path):
    config = rl_config(tmp_path)
    whole = setup_prompts(config, TOKENIZER).train
    expected = [prompt.where for prompt in whole.next_prompts(9)]
    first, second = (setup_prompts(config, TOKENIZER).train for _ in range(2))
    begun = [prompt.where for prompt in first.next_prompts(4)]
    second.load_state_dict(first.state_dict())
    assert begun + [prompt.where for prompt in second.next_prompts(5)] == expected
    other = setup_prompts(rl_config(tmp_path, seed=1), TOKENIZER).train
    assert [prompt.where for prompt in other.next_prompts(9)] != expected


def test_a_function_gives_prompts(tmp_path, monkeypatch):
    (tmp_path / "additions_of_this_test.py").write_text(
        "def additions(size):\n"
        "    return [{'question': f'{i}+1', 'answer': i + 1, 'level': i} for i in range(size)]\n"
    )
    monkeypatch.chdir(tmp_path)
    source = {"type": "function", "path": "additions_of_this_test:additions"}
    config = rl_config(
        tmp_path,
        env=EXACT | {"source": source | {"params": {"size": 9}}, "shuffle": False},
        val={"source": None, "fraction": 0.2},
    )
    prompts = setup_prompts(config, TOKENIZER)
    trained = prompts.train.next_prompts(7)
    assert {p.question for p in trained} | {p.question for p in prompts.held_out} == {
        f"{i}+1" for i in range(9)
    }
    for prompt in trained:
        assert prompt.where == f"additions_of_this_test:additions[{prompt.row['level']}]"
        assert prompt.reference == str(prompt.row["level"] + 1)


def test_a_function_that_makes_other_rows_on_resume_is_refused(tmp_path, monkeypatch):
    module = types.ModuleType("questions_of_this_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    rows = [{"question": f"{i}+1", "answer": i + 1} for i in range(9)]
    source = {"type": "function", "path": "questions_of_this_test:questions"}
    config = rl_config(tmp_path, env=EXACT | {"source": source}, **NO_VAL)
    module.questions = lambda: rows
    first = setup_prompts(config, TOKENIZER).train
    first.next_prompts(3)
    position = json.loads(json.dumps(first.state_dict()))
    again = setup_prompts(config, TOKENIZER).train
    again.load_state_dict(position)
    assert [p.where for p in again.next_prompts(9)] == [p.where for p in first.next_prompts(9)]
    module.questions = lambda: rows[::-1]
    with pytest.raises(UserError, match="its function makes other rows, or in another order"):
        setup_prompts(config, TOKENIZER).train.load_state_dict(position)


def test_a_mix_keeps_its_proportions(tmp_path):
    parts = [
        {"type": "reasoning_gym", "task": "spell_backward", "size": 50, "weight": 3.0},
        {"type": "reasoning_gym", "task": "letter_counting", "size": 50, "weight": 1.0},
    ]
    config = rl_config(
        tmp_path,
        env={"source": {"type": "mix", "sources": parts}},
        data={"seq_len": 2048},
        val={"source": None, "fraction": 0.1},
    )
    setup = setup_prompts(config, TOKENIZER)
    # Five of each are held out, five of all evaluated: in turn from each.
    held_out = [prompt.source for prompt in setup.held_out]
    assert held_out == ["spell_backward", "letter_counting"] * 2 + ["spell_backward"]
    prompts = setup.train.next_prompts(16)
    tasks = [prompt.where.partition("(")[0] for prompt in prompts]
    assert [prompt.source for prompt in prompts] == tasks
    assert (tasks.count("spell_backward"), tasks.count("letter_counting")) == (12, 4)
    assert all(prompt.score_task(prompt.reference) == 1.0 for prompt in prompts)
