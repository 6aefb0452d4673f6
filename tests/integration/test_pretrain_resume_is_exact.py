"""A pretraining run that stops and resumes is the run that never stopped; metrics add up."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.metrics import repeatable_metrics
from tests.support.pretrain_configs import pretrain_config, write_corpus
from tests.support.spawn import run_ranks
from tests.support.texts import texts, write_jsonl_texts
from trainer.config import PretrainConfig

pytestmark = pytest.mark.distributed

CHANGES: dict[str, Any] = {"val": {"interval": 2, "prompts": ("1", "words"), "max_new_tokens": 5}}


def run_all(folder: str) -> None:
    from trainer.loops.pretrain import run_pretrain

    corpus = write_corpus(Path(folder) / "corpus")
    whole, parted = Path(folder) / "whole", Path(folder) / "parted"
    changes = {**CHANGES, "val": {**CHANGES["val"], "fraction": 0.2, "max_packs": 3}}
    run_pretrain(pretrain_config(whole, corpus, max_steps=6, **changes))
    run_pretrain(pretrain_config(parted, corpus, max_steps=2, **changes))
    resume = {"resume": "latest"}
    run_pretrain(pretrain_config(parted, corpus, max_steps=6, ckpt=resume, **changes))


def run_to_the_end_of_the_data(folder: str) -> list[str]:
    """Train until the data end; go on with more epochs; return what was raised the first time."""
    from trainer.errors import UserError
    from trainer.loops.pretrain import run_pretrain

    corpus = Path(folder) / "words.jsonl"
    if dist.get_rank() == 0:
        write_jsonl_texts(corpus, texts(40, "words", 90))
    dist.barrier()

    def config(max_epochs: int, **changes: Any) -> PretrainConfig:
        source = {"type": "files", "path": str(corpus), "max_epochs": max_epochs}
        data = {"seq_len": 64, "batch_size": 5, "source": source}
        run = Path(folder) / "ended"
        return pretrain_config(run, Path(folder), data=data, val={}, **changes)

    with pytest.raises(UserError) as raised:
        run_pretrain(config(1, max_steps=100))
    dist.barrier()  # rank 0 has written its last line
    step = len(repeatable_metrics(Path(folder) / "ended"))
    run_pretrain(config(9, max_steps=step + 2, ckpt={"resume": "latest"}))
    return [str(raised.value), str(step)]


def test_where_the_data_end_the_state_is_saved_and_more_epochs_go_on(tmp_path):
    (message, step), other = run_ranks(2, run_to_the_end_of_the_data, str(tmp_path), timeout_s=200)
    assert [message, step] == other
    assert f"raise max_epochs or give more text; the state after step {step} is saved" in message
    assert int(step) > 0
    steps = [line["step"] for line in repeatable_metrics(tmp_path / "ended")]
    assert steps == list(range(1, int(step) + 3))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    run_ranks(1, run_all, str(folder), timeout_s=200)
    return folder / "whole", folder / "parted"


def test_weights_are_bitwise_those_of_the_whole_run(folders):
    whole, parted = (folder / "weights" / "step_6" / "model.safetensors" for folder in folders)
    assert whole.read_bytes() == parted.read_bytes()


def test_metrics_are_those_of_the_whole_run(folders):
    whole, parted = (repeatable_metrics(folder) for folder in folders)
    assert [line["step"] for line in parted] == [1, 2, 3, 4, 5, 6]
    assert parted == whole


def test_losses_of_the_sources_add_up_to_the_loss(folders):
    for line in repeatable_metrics(folders[0]):
        # Five packs a step, three of the one source and two of the other; a token short of a
        # target (a document's last) shifts the weights by less than the tolerance.
        mean = (3 * line["loss/words"] + 2 * line["loss/lines"]) / 5
        assert line["loss/mean"] == pytest.approx(mean, rel=5e-3)
        assert line["loss/perplexity"] == pytest.approx(math.exp(line["loss/mean"]))
        assert (line["data/packs/words"], line["data/packs/lines"]) == (
            3 * line["step"],
            2 * line["step"],
        )


def test_bits_per_byte_follow_from_the_validation_loss(folders):
    evaluated = [line for line in repeatable_metrics(folders[0]) if "val/loss" in line]
    assert [line["step"] for line in evaluated] == [2, 4, 6]
    ratios = [line["val/bits_per_byte"] / line["val/loss"] for line in evaluated]
    # Built-in tokenizer: a token a byte, and a little for the ends of documents.
    assert ratios == pytest.approx([ratios[0]] * 3)
    assert 1 <= ratios[0] * math.log(2) < 1.1
