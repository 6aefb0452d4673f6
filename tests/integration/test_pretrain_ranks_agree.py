"""Ranks pretrain on one global order, and refuse together what one of them lacks."""

import json
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.pretrain_configs import pretrain_config, write_corpus
from tests.support.spawn import run_ranks
from trainer.config.pretrain import TextFilesSource
from trainer.data.shards.job import TokenizeRequest
from trainer.data.shards.writer import tokenize

pytestmark = pytest.mark.distributed

SPLITS = {
    "2 shards, ep 2": {"dp_shard": 2, "ep": 2},
    "2 replicas": {"dp_replicate": 2, "dp_shard": 1},
}


def run_split(folder: str, corpus: str, split: dict) -> None:
    from trainer.loops.pretrain import run_pretrain

    parallel = {"device": "cpu", **split}
    run_pretrain(pretrain_config(Path(folder), Path(corpus), parallel=parallel))


def run_from(folder: str, corpus: str, split: dict, max_steps: int) -> None:
    from trainer.loops.pretrain import run_pretrain

    parallel = {"device": "cpu", **split}
    changes = {"parallel": parallel, "max_steps": max_steps, "ckpt": {"resume": "latest"}}
    run_pretrain(pretrain_config(Path(folder), Path(corpus), **changes))


def run_without_a_shard(folder: str) -> str:
    """Train on shards that rank 1 lacks one of; return what this rank raises."""
    from trainer.errors import UserError
    from trainer.loops.pretrain import run_pretrain

    own = Path(folder) / f"shards-{dist.get_rank()}"
    source = {"type": "tokens", "path": str(own)}
    data = {"seq_len": 64, "batch_size": 2, "source": source}
    config = pretrain_config(Path(folder) / "run", Path(folder), data=data, val={})
    try:
        run_pretrain(config)
    except UserError as error:
        return str(error)
    return "trained"


def metrics_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def single(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("single") / "run"
    run_ranks(1, run_split, str(folder), str(corpus), {})
    return metrics_of(folder)


@pytest.mark.parametrize("split", SPLITS.values(), ids=list(SPLITS))
def test_losses_do_not_depend_on_the_ranks(corpus, single, tmp_path, split):
    run_ranks(2, run_split, str(tmp_path / "run"), str(corpus), split)
    for line, reference in zip(metrics_of(tmp_path / "run"), single, strict=True):
        for key in ("progress/num_tokens", "data/packs/words", "data/epochs/lines"):
            assert line[key] == reference[key], key
        for key in ("loss/mean", "loss/words", "loss/lines", "val/bits_per_byte"):
            # fp32 sums over other splits.
            assert line.get(key) == pytest.approx(reference.get(key), abs=1e-5), key


def test_a_run_goes_on_at_other_numbers_of_ranks(corpus, single, tmp_path):
    """Five packs a step are dealt unevenly to three ranks and to four."""
    folder = str(tmp_path / "run")
    run_ranks(3, run_from, folder, str(corpus), {"dp_shard": 3}, 1)
    run_ranks(4, run_from, folder, str(corpus), {"dp_replicate": 2, "dp_shard": 2, "ep": 2}, 2)
    run_ranks(1, run_from, folder, str(corpus), {}, 3)
    for line, reference in zip(metrics_of(tmp_path / "run"), single, strict=True):
        assert line["progress/num_tokens"] == reference["progress/num_tokens"]
        for key in ("loss/mean", "loss/words", "loss/lines", "optim/grad_norm"):
            assert line[key] == pytest.approx(reference[key], abs=1e-5), key


def test_a_shard_that_one_rank_lacks_is_refused_by_all(corpus, tmp_path):
    source = TextFilesSource(path=str(corpus / "words.jsonl"))
    tokenize(TokenizeRequest(source, tmp_path / "shards-0", None, 1, 1 << 20), lambda line: None)
    shutil.copytree(tmp_path / "shards-0", tmp_path / "shards-1")
    (tmp_path / "shards-1" / "shard-00000.tokens").unlink()
    errors = run_ranks(2, run_without_a_shard, str(tmp_path))
    assert errors[0] == errors[1]
    assert "rank 1: data.source: shard" in errors[0]
    assert "shards-1/shard-00000.tokens is missing" in errors[0]
    assert not (tmp_path / "run").exists()
