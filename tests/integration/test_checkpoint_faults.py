"""One rank's failure to save ends in one message on every rank, and harms nothing."""

import errno
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.optim import Optimizer
from transformers import PreTrainedModel

from tests.support.networks import moe_architecture, random_model
from tests.support.one_step import train_step
from tests.support.spawn import run_ranks
from trainer.checkpoint import CheckpointStore
from trainer.checkpoint.state import all_shards, view_optimizer
from trainer.config.optim import MuonConfig
from trainer.config.parallel import ParallelConfig
from trainer.errors import UserError
from trainer.model import setup_model
from trainer.model.export import save_hf_weights
from trainer.optim import setup_optimizer
from trainer.parallel import build_mesh
from trainer.parallel.boxes import local_part

pytestmark = pytest.mark.distributed

WORLD_SIZE = 3


@dataclass(frozen=True)
class Outcome:
    """What one rank saw of one fault."""

    message: str
    kind: str
    state_untouched: bool
    entries: list[str]
    saved_after: list[int]


@contextmanager
def full_disk(rank: int) -> Iterator[None]:
    """Let files of rank 1 grow to 4 KiB and no further."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def fails_on(faulty: int, target: str) -> Callable:
    @contextmanager
    def fault(rank: int) -> Iterator[None]:
        error = OSError(errno.EROFS, "Read-only file system")
        if rank == faulty:
            with mock.patch(target, side_effect=error):
                yield
        else:
            yield

    return fault


WRITE = "torch.distributed.checkpoint.FileSystemWriter.write_data"
SAVE_FAULTS = {
    "disk-full-on-rank-1": full_disk,
    "write-fails-on-rank-2": fails_on(2, WRITE),
    "write-fails-on-rank-0": fails_on(0, WRITE),
    "folder-cannot-be-made": fails_on(0, "trainer.checkpoint.writer.start_folder"),
    "rename-fails": fails_on(0, "trainer.checkpoint.writer.publish"),
}


def build() -> tuple[PreTrainedModel, Optimizer]:
    mesh = build_mesh(ParallelConfig(), "cpu")
    model = setup_model(random_model(moe_architecture()), mesh)
    optim = MuonConfig(ns_dtype="float32")
    return model, setup_optimizer(optim, model.named_parameters(), mesh)


def state(model: PreTrainedModel, optimizer: Optimizer) -> list[torch.Tensor]:
    shards = all_shards(model, view_optimizer(model, optimizer), {}, rank=0)
    return [shard.local.clone() for shard in shards.values()]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def outcome_of(action: Callable[[], object]) -> tuple[str, str]:
    try:
        action()
    except (RuntimeError, UserError) as error:
        return str(error), type(error).__name__
    return "", ""


def save_under_every_fault(folder: Path) -> dict[str, Outcome]:
    rank = dist.get_rank()
    model, optimizer = build()
    found: dict[str, Outcome] = {}
    for asynchronous in (False, True):
        for name, fault in SAVE_FAULTS.items():
            case = f"{name}-{'async' if asynchronous else 'sync'}"
            store = CheckpointStore(folder / case, keep_last=1, asynchronous=asynchronous)
            store.save(1, model, optimizer, {"n": 1})
            store.wait()
            before = state(model, optimizer)

            def save(store: CheckpointStore = store) -> None:
                store.save(2, model, optimizer, {"n": 2})
                store.wait()

            with fault(rank):
                message, kind = outcome_of(save)
            dist.barrier()
            entries = sorted(path.name for path in store.root.iterdir())
            untouched = same(state(model, optimizer), before)
            dist.barrier()
            train_step(model, optimizer)
            save()
            dist.barrier()
            found[case] = Outcome(message, kind, untouched, entries, store.steps())
    return found


def meet_other_faults(folder: Path) -> dict[str, tuple[str, str]]:
    rank = dist.get_rank()
    model, optimizer = build()
    store = CheckpointStore(folder / "checkpoints")
    found = {}
    with fails_on(0, "trainer.model.export.publish")(rank):
        found["weights"] = outcome_of(lambda: save_hf_weights(model, None, folder / "hf"))
    found["missing-step"] = outcome_of(lambda: store.load(7, model, optimizer))
    store.save(1, model, optimizer, {})
    dist.barrier()
    with fails_on(1, "trainer.checkpoint.safe_load.Path.open")(rank):
        found["unreadable-index"] = outcome_of(lambda: store.load(1, model, optimizer))
    with fails_on(2, "torch.distributed.checkpoint.FileSystemReader.read_data")(rank):
        found["unreadable-tensors"] = outcome_of(lambda: store.load(1, model, optimizer))
    if rank == 1:
        local_part(model.get_parameter("model.layers.0.mlp.experts.down_proj")).fill_(torch.nan)
    found["non-finite"] = outcome_of(lambda: store.save(2, model, optimizer, {}))
    found["non-finite-weights"] = outcome_of(lambda: save_hf_weights(model, None, folder / "hf"))
    dist.barrier()
    assert store.steps() == [1]
    assert not (folder / "hf").exists()
    return found


def run_both(folder: Path) -> tuple[dict[str, Outcome], dict[str, tuple[str, str]]]:
    return save_under_every_fault(folder / "faults"), meet_other_faults(folder)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list:
    return run_ranks(WORLD_SIZE, run_both, tmp_path_factory.mktemp("runs"))


CASES = [f"{name}-{how}" for how in ("sync", "async") for name in SAVE_FAULTS]


@pytest.mark.parametrize("case", CASES)
def test_failed_save_is_one_message_on_every_rank(ranks: list, case: str):
    outcomes = [saves[case] for saves, _ in ranks]
    assert len({outcome.message for outcome in outcomes}) == 1
    assert {outcome.kind for outcome in outcomes} == {"RuntimeError"}
    message = outcomes[0].message
    assert message.startswith("step_2 could not be saved in ")
    assert "the training state is untouched and step_1 is the latest" in message


@pytest.mark.parametrize("case", CASES)
def test_failed_save_leaves_checkpoint_and_training_as_they_were(ranks: list, case: str):
    for saves, _ in ranks:
        assert saves[case].entries == ["step_1"]
        assert saves[case].state_untouched
        assert saves[case].saved_after == [2], "the next save works"


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("disk-full-on-rank-1-sync", "rank 1: "),
        ("write-fails-on-rank-2-sync", "rank 2: [Errno 30] Read-only file system"),
        ("write-fails-on-rank-2-async", "rank 2: [Errno 30] Read-only file system"),
        ("rename-fails-sync", "rank 0: [Errno 30] Read-only file system"),
    ],
)
def test_message_names_rank_and_cause(ranks: list, case: str, text: str):
    assert text in ranks[0][0][case].message


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        ("weights", "RuntimeError", "weights were not written to "),
        ("missing-step", "UserError", "ckpt.resume=7: "),
        ("unreadable-index", "UserError", "rank 1: "),
        ("unreadable-tensors", "RuntimeError", "rank 2: "),
        (
            "non-finite",
            "RuntimeError",
            "rank 1: model.layers.0.mlp.experts.down_proj holds values that are not finite",
        ),
        ("non-finite-weights", "RuntimeError", "rank 1: weights are not saved: "),
    ],
)
def test_other_failures_are_one_message_on_every_rank(ranks: list, case: str, kind: str, text: str):
    assert len({others[case] for _, others in ranks}) == 1
    message, raised = ranks[0][1][case]
    assert raised == kind
    assert text in message
