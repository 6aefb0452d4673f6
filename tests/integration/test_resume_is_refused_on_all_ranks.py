"""A resume or start that data or settings forbid ends on every rank, before the folder changes."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.rl_configs import rl_config
from tests.support.spawn import run_ranks

pytestmark = pytest.mark.distributed

ROWS = [{"question": f"{i}+1", "answer": str(i + 1)} for i in range(40)]
SOURCE = {"type": "function", "path": f"{__name__}:rows"}
rows_of_rank: dict[int, list[dict[str, str]]] = {}
"""What `rows` returns where it is not `ROWS`."""
OTHERS = [ROWS[0], ROWS[2], ROWS[1], *ROWS[3:]]


def rows() -> list[dict[str, str]]:
    return rows_of_rank.get(int(os.environ["RANK"]), ROWS)


def config_of(folder: str, temperature: float = 1.0, **changes: Any) -> Any:
    return rl_config(
        Path(folder),
        max_steps=3,
        env={"source": SOURCE, "rewards": [{"type": "exact_match"}]},
        rollout={"num_updates": 2, "temperature": temperature},
        val={"source": None},
        **changes,
    )


def supervised(folder: str) -> Any:
    from trainer.config import SFTConfig

    base = rl_config(Path(folder)).model_dump(mode="json")
    shared = {name: base[name] for name in ("max_steps", "model", "optim", "wandb")}
    data = {"source": SOURCE, "seq_len": 64, "batch_size": 2}
    return SFTConfig.model_validate({"output_dir": f"{folder}/sft", "data": data, **shared})


def message_of(run: Any, config: Any) -> str:
    from trainer.errors import UserError

    with pytest.raises(UserError) as caught:
        run(config)
    return str(caught.value)


def run_all(folder: str) -> dict[str, str]:
    from trainer.loops.rl import run_rl
    from trainer.loops.sft import run_sft
    from trainer.parallel import world

    world.close_world = lambda: None  # the group serves every run
    run_rl(config_of(folder, ckpt={"interval": 1}))
    resume = {"ckpt": {"resume": 1}}
    messages = {"settings": message_of(run_rl, config_of(folder, 0.5, **resume))}
    rows_of_rank.update({0: OTHERS, 1: OTHERS})
    messages["other rows"] = message_of(run_rl, config_of(folder, **resume))
    rows_of_rank.pop(0)
    messages["other rows on rank 1"] = message_of(run_rl, config_of(folder, **resume))
    messages["SFT"] = message_of(run_sft, supervised(folder))
    return messages


MESSAGES = {
    "settings": "rollout.temperature=0.5: the checkpoint holds 12 rollouts made under 1.0",
    "other rows": "env.source: its function makes other rows, or in another order",
    "other rows on rank 1": "the ranks hold different data",
    "SFT": "the ranks hold different data",
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refused")
    return folder, run_ranks(2, run_all, str(folder), timeout_s=120)


@pytest.mark.parametrize("case", MESSAGES)
def test_every_rank_refuses_with_one_message(refused, case):
    for messages in refused[1]:
        assert messages[case].startswith(MESSAGES[case])


def test_the_record_stays_as_it_was(refused):
    folder, _ = refused
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert not list(folder.glob("config.resume-*"))
    assert not (folder / "sft").exists()
