import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from trainer.cli.commands import config_class
from trainer.config import RLConfig, SFTConfig, dump_config, load_config
from trainer.config.base import Count, Float, Section
from trainer.config.optim import AdamWConfig, MuonConfig, SGDConfig
from trainer.errors import UserError

BASE = """
output_dir = "outputs/x"
max_steps = 3
[model]
weights = "random"
[model.architecture]
type = "qwen3_moe"
vocab_size = 300
hidden_size = 64
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 16
num_experts = 8
num_experts_per_tok = 2
moe_intermediate_size = 32
[optim]
mu = 0.9
[data.source]
type = "reasoning_gym"
task = "spell_backward"
size = 100
"""


@pytest.fixture
def base(tmp_path):
    path = tmp_path / "base.toml"
    path.write_text(BASE)
    return str(path)


@pytest.fixture
def load(base, tmp_path):
    """Load the base, then TOML texts as later files, then flags."""

    def load(*flags: str, files: tuple[str, ...] = ()) -> tuple[SFTConfig, list[str]]:
        args = ["@", base]
        for index, text in enumerate(files):
            path = tmp_path / f"later{index}.toml"
            path.write_text(text)
            args += ["@", str(path)]
        return load_config(SFTConfig, [*args, *flags])

    return load


def refused(load, *flags: str, files: tuple[str, ...] = ()) -> str:
    with pytest.raises(UserError) as info:
        load(*flags, files=files)
    return str(info.value)


# Layers


def test_later_file_wins_and_flags_win_over_files(load):
    config, notes = load("--seed", "3", files=("seed = 1\nmax_steps = 5", "seed = 2"))
    assert (config.seed, config.max_steps, notes) == (3, 5, [])


def test_flag_before_a_file_still_wins(base, tmp_path):
    later = tmp_path / "later.toml"
    later.write_text("seed = 9")
    config, _ = load_config(SFTConfig, ["@", base, "--seed", "3", "@", str(later)])
    assert config.seed == 3


@pytest.mark.parametrize("spelling", [["--data.source", "@", "F"], ["--data.source", "@F"]])
def test_section_from_its_own_file(base, tmp_path, spelling):
    path = tmp_path / "source.toml"
    path.write_text('type = "files"\npath = "rows.jsonl"')
    args = [word.replace("F", str(path)) for word in spelling]
    config, _ = load_config(SFTConfig, ["@", base, *args])
    assert config.data.source.model_dump()["path"] == "rows.jsonl"


def test_section_file_keeps_its_place_among_files(base, tmp_path):
    section, whole = tmp_path / "optim.toml", tmp_path / "whole.toml"
    section.write_text("lr = 0.5")
    whole.write_text("[optim]\nlr = 0.25")
    config, _ = load_config(SFTConfig, ["@", base, "--optim", "@", str(section), "@", str(whole)])
    assert config.optim.lr == 0.25


def test_change_of_type_drops_what_the_new_type_lacks_and_says_so(load):
    config, notes = load("--optim.type", "adamw", files=("[optim]\nlr = 0.5\nns_steps = 3",))
    assert config.optim == AdamWConfig(lr=0.5)
    assert len(notes) == 1
    assert "optim.type changes from 'muon' to 'adamw' (on the command line)" in notes[0]
    assert "optim.mu=0.9, optim.ns_steps=3, which 'adamw' lacks" in notes[0]


def test_change_of_a_nested_type_replaces_that_section(load):
    later = '[data.source]\ntype = "files"\npath = "rows"\n[model.architecture]\ntype = "qwen3"'
    config, notes = load(files=(later,))
    assert config.data.source.model_dump() == {"type": "files", "path": "rows", "weight": 1.0}
    assert config.model.architecture.type == "qwen3"
    assert "data.source.task='spell_backward'" in " ".join(notes)
    assert "model.architecture.num_experts=8" in " ".join(notes)


def test_type_changed_there_and_back_does_not_bring_old_keys_back(load):
    files = ('[optim]\ntype = "sgd"', '[optim]\ntype = "muon"')
    assert load(files=files)[0].optim == MuonConfig()


def test_keys_of_the_layer_that_changes_the_type_stay_strict(load):
    message = refused(load, "--optim.type", "adamw", "--optim.mu", "0.9")
    assert "optim.mu=0.9: unknown key of type 'adamw'" in message
    message = refused(load, files=('[optim]\ntype = "adamw"\nmu = 0.5',))
    assert "optim.mu=0.5: unknown key of type 'adamw'" in message


def test_mistyped_key_of_an_older_layer_is_not_dropped_in_silence(load):
    message = refused(load, "--optim.type", "adamw", files=("[optim]\nns_step = 3",))
    assert "optim.ns_step=3: unknown key" in message
    assert "later0.toml" in message


def test_type_given_again_changes_nothing(load):
    config, notes = load("--optim.type", "muon")
    assert (config.optim, notes) == (MuonConfig(mu=0.9), [])


class Inner(Section):
    type: Literal["inner"] = "inner"
    width: Count = 1
    rate: Float = 0.5


class Outer(Section):
    type: Literal["outer"] = "outer"
    width: Count = 7


class Holder(Section):
    part: Annotated[Inner | Outer, Field(discriminator="type")] = Inner(width=4)


def test_default_of_a_section_field_survives_a_flag_beside_it():
    config, _ = load_config(Holder, ["--part.rate", "0.25"])
    assert config.part == Inner(width=4, rate=0.25)


def test_default_of_a_section_field_goes_with_its_type():
    config, notes = load_config(Holder, ["--part.type", "outer"])
    assert (config.part, notes) == (Outer(), [])


def test_none_clears_a_section(load):
    later = '[val.source]\ntype = "files"\npath = "rows"'
    assert load(files=(later,))[0].val.source is not None
    assert load("--val.source", "None", files=(later,))[0].val.source is None


# Flags


def test_flag_on_a_variant_that_a_file_chose_keeps_the_variant(load):
    config, _ = load("--optim.momentum", "0.5", files=('[optim]\ntype = "sgd"',))
    assert config.optim == SGDConfig(momentum=0.5)


@pytest.mark.parametrize("name", ["--data.seq-len", "--data.seq_len"])
@pytest.mark.parametrize("form", ["words", "equals"])
def test_hyphens_and_underscores_are_the_same(load, name, form):
    flag = [name, "64"] if form == "words" else [f"{name}=64"]
    assert load(*flag)[0].data.seq_len == 64


@pytest.mark.parametrize(
    ("words", "tags"),
    [
        (["a", "b"], ("a", "b")),
        (["1"], ("1",)),
        (['["a", "b"]'], ("a", "b")),
        ([], ()),
    ],
)
def test_lists_are_words_or_json(load, words, tags):
    assert load("--wandb.tags", *words)[0].wandb.tags == tags


def test_list_of_lists_is_json(load):
    rows = "[[3, -4, 2], [1.5, -0.5, 0]]"
    assert load("--optim.ns-coefficients", rows)[0].optim.ns_coefficients == (
        (3.0, -4.0, 2.0),
        (1.5, -0.5, 0.0),
    )


def test_list_of_sections_is_json(load):
    sources = json.dumps([{"type": "files", "path": "a", "weight": 2}])
    config, _ = load("--data.source.type", "mix", "--data.source.sources", sources)
    assert config.data.source.model_dump()["sources"][0]["weight"] == 2.0


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        (["--model.compile"], True),
        (["--model.compile", "true"], True),
        (["--model.compile=False"], False),
        (["--no-model.compile"], False),
    ],
)
def test_true_or_false(load, flags, value):
    assert load(*flags, files=("[model]\ncompile = false",))[0].model.compile is value


@pytest.mark.parametrize(
    ("flag", "text", "value"),
    [
        ("--optim.lr", "1e-4", 1e-4),
        ("--optim.lr", "1", 1.0),
        ("--optim.max-norm", "None", None),
        ("--ckpt.resume", "latest", "latest"),
        ("--ckpt.resume", "2", 2),
        ("--wandb.name", "123", "123"),
        ("--wandb.name", "1e-4", "1e-4"),
        ("--wandb.name", "true", "true"),
        ("--parallel.dp-shard", "-1", -1),
    ],
)
def test_text_becomes_the_type_of_the_field(load, flag, text, value):
    section, _, name = flag[2:].replace("-", "_").partition(".")
    found = getattr(getattr(load(flag, text)[0], section), name)
    assert (found, type(found)) == (value, type(value))


def test_free_table_takes_names_with_hyphens_or_underscores(load):
    words = ["--data.source.params.max_word-len", "5", "--data.source.params.kind", "x"]
    config, _ = load(*words, "--data.source.params.sizes", "[1, 2]")
    params = config.data.source.model_dump()["params"]
    assert params == {"max_word_len": 5, "kind": "x", "sizes": [1, 2]}


@pytest.mark.parametrize("first", [0, 1])
def test_section_as_a_whole_and_its_fields_add_up(load, first):
    flags = [["--wandb", '{"name": "a"}'], ["--wandb.project", "p"]]
    config, _ = load(*flags[first], *flags[1 - first])
    assert (config.wandb.name, config.wandb.project) == ("a", "p")


@pytest.mark.parametrize("byte_order_mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_files_of_other_editors_are_read(base, tmp_path, byte_order_mark, line_end):
    path = tmp_path / "later.toml"
    path.write_bytes(byte_order_mark + f"max_steps = 9{line_end}seed = 4{line_end}".encode())
    config, _ = load_config(SFTConfig, ["@", base, "@", str(path)])
    assert (config.max_steps, config.seed) == (9, 4)


def test_steps_and_ratio_of_a_phase_give_way_to_the_later_layer(load):
    ratio, steps = "[scheduler]\nwarmup_ratio = 0.5", "[scheduler]\nwarmup_steps = 1"
    config, notes = load(files=(ratio, steps))
    assert (config.scheduler.warmup_ratio, config.scheduler.warmup_steps) == (None, 1)
    assert "warmup_steps=1" in notes[0]
    assert "takes the place of scheduler.warmup_ratio=0.5" in notes[0]
    config, _ = load("--scheduler.warmup-ratio", "0.25", files=(ratio, steps))
    assert (config.scheduler.warmup_ratio, config.scheduler.warmup_steps) == (0.25, None)


@pytest.mark.parametrize("later", ["flag", "file"])
def test_an_empty_free_table_of_a_later_layer_empties_it(load, later):
    files = ("[data.source.params]\na = 1", "[data.source.params]\nb = 2")
    assert load(files=files)[0].data.source.model_dump()["params"] == {"a": 1, "b": 2}
    if later == "flag":
        config, _ = load("--data.source.params", "{}", files=files)
    else:
        config, _ = load(files=(*files, "[data.source.params]"))
    assert config.data.source.model_dump()["params"] == {}


def test_text_in_a_free_table_of_a_file_stays_text(load):
    config, _ = load(files=('[data.source.params]\na = "1"\nb = "true"',))
    assert config.data.source.model_dump()["params"] == {"a": "1", "b": "true"}


# Refusals: field as typed, value, rule, remedy


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--optim.ns-steps", "0"], ["optim.ns_steps=0", "an integer, at least 1"]),
        (["--optim.ns-steps", "1.5"], ["optim.ns_steps='1.5'", "an integer"]),
        (["--optim.lr", "nan"], ["optim.lr=nan", "finite"]),
        (["--optim.lr", "-inf"], ["optim.lr=-inf", "finite"]),
        (["--optim.lr", "fast"], ["optim.lr='fast'", "a finite number, at least 0"]),
        (["--optim.kernel", "gramm"], ["optim.kernel='gramm'", "did you mean 'gram'?"]),
        (["--optim.type", "adam"], ["optim.type='adam'", "did you mean 'adamw'?"]),
        (["--optim", "adamw"], ["optim='adamw': is a section", "optim.type"]),
        (["--optim.ns-stepz", "3"], ["optim.ns_stepz=3: unknown key", "optim.ns_steps?"]),
        (["--model.architecture.hiden-size", "3"], ["architecture.hidden_size?"]),
        (["--maxsteps", "3"], ["maxsteps=3: unknown key", "did you mean max_steps?"]),
        (["--lr", "3"], ["lr=3: unknown key", "did you mean optim.lr?"]),
        (["--zzz", "3"], ["zzz=3: unknown key", "known here are output_dir, max_steps"]),
        (["--optim.ns-coefficients", "[[1, 2"], ["--optim.ns-coefficients [[1, 2", "JSON"]),
        (["--optim.ns-coefficients", "[[1, 2]]"], ["ns_coefficients=[[1, 2]]", "3 items"]),
        (["--profile.trace-steps", "1", "x"], ["profile.trace_steps[1]='x'", "an integer"]),
        (["--ckpt.resume", "last"], ["ckpt.resume='last'", "'latest'"]),
        (["--seed"], ["--seed: no value given"]),
        (["--seed", "1", "2"], ["--seed 1 2: 2 values given"]),
        (["--no-seed"], ["--no-seed: only a true-or-false field"]),
        (["--model.compile", "maybe"], ["model.compile='maybe'", "true or false"]),
        (["demo.toml"], ["unexpected argument 'demo.toml'", "'@ FILE'"]),
        (["@"], ["'@' names no file"]),
        (["--data", "@"], ["'--data @' names no file"]),
        (["@", "nowhere/x.toml"], ["@ nowhere/x.toml: no such file"]),
        (["--data.source.type", "files"], ["data.source.path: required and not given"]),
        (["--parallel.ep", "3"], ["parallel.ep=3", "num_experts=8", "choose an ep"]),
        (["--model.weights", "pretrained"], ["model.weights='pretrained' needs a source"]),
        (["--data.source.params.x", "nan"], ["data.source.params.x=nan", "finite"]),
        (["--data.source.params", '{"x": Infinity}'], ["data.source.params.x=inf", "finite"]),
        (["--optim.lr.x", "1"], ["optim.lr={'x': 1}", "a finite number"]),
        (["--optim", "adamw", "--optim.lr", "1"], ["--optim.lr", "'optim'"]),
        (["--optim.type"], ["--optim.type: no value given", "'muon', 'adamw', 'sgd', 'dion'"]),
        (["--optim.lr", " 1"], ["optim.lr=' 1'", "a finite number"]),
        (["--optim.lr", "\u0661"], ["optim.lr='\u0661'", "a finite number"]),
        (["--optim..lr", "1"], ["--optim..lr: a name is missing"]),
        (["--seed.type", "x"], ["seed={'type': 'x'}", "an integer"]),
        (["--wandb.type", "x"], ["wandb.type='x': unknown key"]),
        (["@", ""], ["'@' names no file"]),
        (["--wandb", '{"name": "a", "name": "b"}'], ["'name' is given twice"]),
        (["--seed", str(2**32)], ["seed=4294967296", "at most 4294967295"]),
        (["--parallel.timeout-s", "1e30"], ["parallel.timeout_s=1e+30", "at most"]),
        (["--output-dir", ""], ["output_dir=''", "text, not empty"]),
        (["--output-dir", "a\0b"], ["output_dir='a\\x00b'", "NUL"]),
        (["--output-dir", "a\udcff"], ["output_dir='a\\udcff'", "UTF-8"]),
        (["--model.name", ""], ["model.name=''", "text, not empty"]),
        (["--ckpt.resume", "4"], ["ckpt.resume=4", "max_steps=3"]),
        (["--scheduler.warmup-steps", "4"], ["scheduler.warmup_steps=4", "max_steps=3"]),
        (["--max-steps", "1" * 5000], ["max_steps='1111", "an integer"]),
        (
            ["--data.template-kwargs", '{"a": [{"b": null}]}'],
            ["data.template_kwargs: a.0.b=None", "leave it out"],
        ),
        (["--model.architecture.head-dim", "15"], ["architecture.head_dim=15", "even"]),
        (
            ["--model.architecture.num-key-value-heads", "3"],
            ["num_attention_heads=4", "num_key_value_heads=3"],
        ),
        (
            ["--model.architecture.mlp-only-layers", "2"],
            ["architecture.mlp_only_layers=[2]", "num_hidden_layers=2"],
        ),
    ],
    ids=lambda value: " ".join(value) if value and value[0][:1] in "-@d" else "",
)
def test_refused_flag(load, flags, parts):
    message = refused(load, *flags)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('[optim]\nlr = "1e-4"', ["optim.lr='1e-4'", "without quotes", "later0.toml"]),
        ("[optim]\nlr = inf", ["optim.lr=inf", "finite"]),
        ("max_steps = 2.0", ["max_steps=2.0", "an integer"]),
        ("max_steps = true", ["max_steps=True", "an integer"]),
        ('max_steps = "3"', ["max_steps='3'", "without quotes"]),
        ("output_dir = 3", ["output_dir=3", "put it in quotes"]),
        ("output_dir = 2026-01-02", ["output_dir=2026-01-02", "in quotes"]),
        ("[data.source.params]\nday = 10:30:00", ["data.source.params.day=10:30:00"]),
        ("model.compile = 1", ["model.compile=1", "true or false"]),
        ('[data.source]\ntype = "mix"\nsources = []', ["data.source.sources=[]", "non-empty"]),
        (
            '[data.source]\ntype = "mix"\nsources = [{ type = "fils" }]',
            ["data.source.sources[0].type='fils'", "did you mean 'files'?"],
        ),
        (
            '[data.source]\ntype = "mix"\nsources = [{ type = "files", pth = "x", path = "y" }]',
            ["data.source.sources[0].pth='x'", "did you mean data.source.sources[0].path?"],
        ),
        ('[val.source]\npath = "x"', ["val.source.type: not given", "'files', 'hub'"]),
        ("a = [1,", ["later0.toml: not valid TOML", "line"]),
        ("[optim]\nlr = 1\nlr = 2", ["later0.toml: not valid TOML", "line 3"]),
        ("'optim.lr' = 1", ["'optim.lr'=1", "write optim.lr without quotes"]),
        ("seed = " + "1" * 5000, ["later0.toml: cannot be read", "digits"]),
        ("x = " + "[" * 5000 + "]" * 5000, ["later0.toml: cannot be read", "recursion"]),
        (
            "[scheduler]\nwarmup_ratio = 0.1\nwarmup_steps = 1",
            ["scheduler.warmup_ratio=0.1", "warmup_steps=1", "remove the other"],
        ),
    ],
)
def test_refused_file(load, text, parts):
    message = refused(load, files=(text,))
    assert all(part in message for part in parts), message


def test_all_refusals_come_in_one_message(load):
    message = refused(load, "--optim.ns-steps", "0", "--seed", "-1", "--zzz", "1")
    assert [line.partition("=")[0] for line in message.splitlines()] == [
        "seed",
        "optim.ns_steps",
        "zzz",
    ]


@pytest.mark.parametrize("content", [b"\xff\xfe", None], ids=["not UTF-8", "a folder"])
def test_file_that_is_no_text(tmp_path, content):
    path = tmp_path / "x.toml"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(UserError, match=r"x\.toml: (not UTF-8|cannot be read)"):
        load_config(SFTConfig, ["@", str(path)])


# What comes out


def test_values_are_plain_python(load):
    config, _ = load(files=("[optim]\nlr = 1\n[data.source.params]\na = [1, 2]",))
    assert type(config.optim.lr) is float
    assert pickle.loads(pickle.dumps(config)) == config
    assert json.loads(json.dumps(config.model_dump()))["optim"]["lr"] == 1.0


COMMAND = re.compile(r"trainer (sft|rl|pretrain)((?: @ \S+| --[\w.-]+ \S+)+)")
REST = {
    "sft": '[data.source]\ntype = "files"\npath = "rows"',
    "rl": '[env.source]\ntype = "reasoning_gym"\ntask = "spell_backward"\nsize = 9',
    "pretrain": '[data.source]\ntype = "stdlib"',
}


@pytest.mark.parametrize("path", sorted(Path("configs").rglob("*.toml")), ids=str)
def test_ready_config_loads_as_its_heading_says_and_is_written_back_equal(path, tmp_path):
    heading = "".join(line[1:] for line in path.read_text().splitlines() if line[:1] == "#")
    command = COMMAND.search(re.sub(r"[\\\s]+", " ", heading))
    assert command is not None, "the heading names no command"
    cls = config_class(command[1])
    yours = tmp_path / "yours.toml"
    yours.write_text(f'output_dir = "x"\nmax_steps = 1\n{REST[command[1]]}')
    words = command[2].replace("YOURS.toml", str(yours)).split()
    assert str(path) in words
    config, notes = load_config(cls, words)
    assert notes == []
    copy = tmp_path / "copy.toml"
    copy.write_text(dump_config(config))
    assert load_config(cls, ["@", str(copy)])[0] == config


def test_pattern_is_named(tmp_path):
    with pytest.raises(UserError, match=r"env.answer.tag='a b': must match \^"):
        load_config(RLConfig, ["--env.answer.type", "tag", "--env.answer.tag", "a b"])


def test_config_imports_without_torch():
    code = "import sys, trainer.config; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "False", run.stderr
