import pytest

from trainer.config import RLConfig, load_config
from trainer.errors import UserError

BASE = """
output_dir = "out"
max_steps = 3
[model]
name = "weights"
[env.source]
type = "reasoning_gym"
task = "spell_backward"
size = 100
"""


def load(tmp_path, *flags, text=BASE):
    path = tmp_path / "rl.toml"
    path.write_text(text)
    return load_config(RLConfig, ["@", str(path), *flags])[0]


def test_a_minimal_config_loads(tmp_path):
    config = load(tmp_path)
    assert config.env.reward_names == ("task",)
    assert config.loss.type == "clip"


def test_another_loss_replaces_the_section(tmp_path):
    config = load(tmp_path, "--loss.type", "gspo", "--loss.clip-high", "0.01")
    assert (config.loss.type, config.loss.clip_low, config.loss.clip_high) == ("gspo", 3e-4, 0.01)


def test_rewards_are_given_as_a_list_of_tables(tmp_path):
    text = BASE + (
        '[[env.rewards]]\ntype = "task"\n'
        '[[env.rewards]]\ntype = "function"\npath = "mine:short"\nweight = 0.1\n'
    )
    config = load(tmp_path, text=text)
    assert config.env.reward_names == ("task", "short")


REFUSED = {
    "a group of one": (["--rollout.num-samples", "1"], "rollout.num_samples=1"),
    "updates that do not divide": (
        ["--rollout.num-prompts", "10", "--rollout.num-updates", "4"],
        "num_updates=4 does not divide num_prompts=10",
    ),
    "no room for a prompt": (
        ["--data.seq-len", "256"],
        "rollout.max_new_tokens=256 leaves no room for a prompt in data.seq_len=256",
    ),
    "a correction that counts twice": (
        ["--loss.importance", "truncate"],
        "importance='truncate' with old_log_probs='sampler'",
    ),
    "bounds exchanged": (
        ["--loss.importance-low", "3.0"],
        "importance_low=3.0 exceeds importance_high=2.0",
    ),
    "unknown key": (["--rollout.temprature", "1"], "rollout.temprature"),
    "temperature of zero": (["--rollout.temperature", "0.0"], "rollout.temperature=0.0"),
    "logits beyond fp32": (["--rollout.temperature", "1e-45"], "rollout.temperature=1e-45"),
    "a bound beyond fp32": (["--loss.clip-high", "1e300"], "loss.clip_high=1e+300"),
    "a pass reward that is none": (["--env.pass-reward", "right"], "pass_reward='right'"),
    "two origins of held-out prompts": (
        ["--val.fraction", "0.1", "--val.source.type", "files", "--val.source.path", "x"],
        "source and fraction=0.1 are both given",
    ),
    "a task reward without a task": (
        ["--val.source.type", "files", "--val.source.path", "x"],
        "a reward of type 'task' needs reasoning_gym prompts, but val.source has type 'files'",
    ),
    "a pattern without a group": (
        ["--env.answer.type", "regex", "--env.answer.pattern", "a+"],
        "pattern='a+' has no group",
    ),
}


@pytest.mark.parametrize(("flags", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_fit_is_refused_by_name(tmp_path, flags, message):
    with pytest.raises(UserError) as caught:
        load(tmp_path, *flags)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "fields", ['type = "task"\nname = "std"', 'type = "function"\npath = "mine:mean"']
)
def test_a_reward_whose_metric_is_taken_is_refused(tmp_path, fields):
    with pytest.raises(UserError, match=r"is a metric of all of them together; give it another"):
        load(tmp_path, text=BASE + f"[[env.rewards]]\n{fields}\n")


def test_rewards_of_one_name_are_refused(tmp_path):
    text = BASE + '[[env.rewards]]\ntype = "task"\n[[env.rewards]]\ntype = "task"\n'
    with pytest.raises(UserError, match="2 are named 'task'"):
        load(tmp_path, text=text)
