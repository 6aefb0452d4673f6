import json
import logging
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from tests.support.networks import moe_architecture, packed_batch, random_model
from trainer.checkpoint import CheckpointStore, writer
from trainer.checkpoint.integrity import check_tensors_alone
from trainer.checkpoint.safe_load import read_index
from trainer.config.optim import AdamWConfig, MuonConfig, OptimizerSection, SGDConfig
from trainer.errors import UserError
from trainer.model import setup_model
from trainer.optim import setup_optimizer

OPTIMIZERS = {
    "muon": MuonConfig(lr=0.01, ns_dtype="float32"),
    "adamw": AdamWConfig(lr=0.01),
    "sgd": SGDConfig(lr=0.01, momentum=0.9),
}


def build(
    mesh: DeviceMesh,
    seed: int,
    optim: OptimizerSection = OPTIMIZERS["adamw"],
    **sizes: object,
) -> tuple[PreTrainedModel, Optimizer]:
    model = setup_model(random_model(moe_architecture(**sizes)), mesh, seed=seed)
    return model, setup_optimizer(optim, model.named_parameters(), mesh)


def train_step(model: PreTrainedModel, optimizer: Optimizer) -> float:
    ids, positions, targets = packed_batch([[5, 7]])
    loss = -model(ids, position_ids=positions, target_ids=targets).log_probs_PS.sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def values(model: PreTrainedModel) -> list[torch.Tensor]:
    return [
        (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for p in model.parameters()
    ]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.mark.parametrize("optim", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_training_goes_on_bit_for_bit_after_a_load(
    root: Path, mesh: DeviceMesh, asynchronous: bool, optim: OptimizerSection
):
    model, optimizer = build(mesh, 0, optim)
    train_step(model, optimizer)
    checkpoints = CheckpointStore(root, asynchronous=asynchronous)
    checkpoints.save(1, model, optimizer, {"data": {"epoch": 3}})
    expected = [train_step(model, optimizer), torch.rand(1).item()]
    checkpoints.wait()

    other, other_optimizer = build(mesh, 1, optim)
    torch.manual_seed(5)
    progress = CheckpointStore(root).load(1, other, other_optimizer)
    assert progress == {"data": {"epoch": 3}}
    assert [train_step(other, other_optimizer), torch.rand(1).item()] == expected
    assert same(values(other), values(model))


def test_asynchronous_save_holds_the_state_at_the_call(
    root: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
):
    model, optimizer = build(mesh, seed=0)
    go = threading.Event()
    write = writer.write_shards

    def write_later(*args):
        assert go.wait(20)
        return write(*args)

    monkeypatch.setattr(writer, "write_shards", write_later)
    checkpoints = CheckpointStore(root, asynchronous=True)
    progress = {"tokens": 1}
    checkpoints.save(1, model, optimizer, progress)
    before = values(model)
    train_step(model, optimizer)
    progress["tokens"] = 2
    assert checkpoints.latest() is None
    go.set()
    checkpoints.wait()
    assert checkpoints.load(1, model, optimizer) == {"tokens": 1}
    assert same(values(model), before)


def test_group_settings_stay_the_runs_own(root: Path, mesh: DeviceMesh):
    model, optimizer = build(mesh, seed=0)
    train_step(model, optimizer)
    checkpoints = CheckpointStore(root)
    checkpoints.save(1, model, optimizer, {})
    optimizer.param_groups[0]["lr"] = 0.5
    checkpoints.load(1, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_without_a_checkpoint_there_is_no_latest(root: Path, mesh: DeviceMesh):
    assert CheckpointStore(root).latest() is None
    assert not root.exists()


def test_missing_step_is_refused_with_those_there_are(root: Path, mesh: DeviceMesh):
    model, optimizer = build(mesh, seed=0)
    checkpoints = CheckpointStore(root)
    checkpoints.save(4, model, optimizer, {})
    with pytest.raises(UserError, match=r"ckpt\.resume=3: .* choose one of \[4\], or 'latest'"):
        checkpoints.load(3, model, optimizer)


def test_old_checkpoints_go_and_leftovers_with_them(root: Path, mesh: DeviceMesh):
    model, optimizer = build(mesh, seed=0)
    (root / "step_2.partial").mkdir(parents=True)
    checkpoints = CheckpointStore(root, keep_last=1, keep_every=10)
    for step in (9, 10, 11):
        checkpoints.save(step, model, optimizer, {})
    assert sorted(path.name for path in root.iterdir()) == ["step_10", "step_11"]


def test_second_save_of_a_step_does_nothing(root: Path, mesh: DeviceMesh):
    model, optimizer = build(mesh, seed=0)
    checkpoints = CheckpointStore(root)
    checkpoints.save(1, model, optimizer, {"first": True})
    checkpoints.save(1, model, optimizer, {"first": False})
    assert checkpoints.read_progress(1) == {"first": True}


def test_resuming_from_an_older_step_replaces_newer_checkpoints(root: Path, mesh: DeviceMesh):
    model, optimizer = build(mesh, seed=0)
    checkpoints = CheckpointStore(root, keep_last=1)
    checkpoints.save(2, model, optimizer, {"branch": "old"})
    checkpoints.save(9, model, optimizer, {"branch": "old"})
    checkpoints = CheckpointStore(root)
    checkpoints.save(2, model, optimizer, {"branch": "old"})
    checkpoints = CheckpointStore(root)
    checkpoints.load(2, model, optimizer)
    checkpoints.save(9, model, optimizer, {"branch": "new"})
    assert checkpoints.read_progress(9) == {"branch": "new"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_model_is_never_saved(root: Path, mesh: DeviceMesh, value: float):
    model, optimizer = build(mesh, seed=0)
    checkpoints = CheckpointStore(root)
    checkpoints.save(1, model, optimizer, {})
    with torch.no_grad():
        model.get_parameter("model.norm.weight").to_local()[3] = value
    with pytest.raises(
        RuntimeError,
        match=r"step_2 could not be saved .*model\.norm\.weight .*step_1 is the latest",
    ):
        checkpoints.save(2, model, optimizer, {})
    assert [path.name for path in root.iterdir()] == ["step_1"]


@pytest.mark.parametrize(
    ("place", "failure"),
    [
        *((place, OSError) for place in ("start_folder", "write_shards", "write_manifest")),
        *(("publish", failure) for failure in (OSError, ValueError, TypeError, KeyError)),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_failure_to_write_leaves_everything_as_it_was(
    root: Path,
    mesh: DeviceMesh,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    failure: type[Exception],
    asynchronous: bool,
):
    model, optimizer = build(mesh, seed=0)
    train_step(model, optimizer)
    checkpoints = CheckpointStore(root, keep_last=1, asynchronous=asynchronous)
    checkpoints.save(1, model, optimizer, {"n": 1})
    checkpoints.wait()
    before = values(model)

    def fail(*_):
        raise failure("No space left on device")

    def save() -> None:
        checkpoints.save(2, model, optimizer, {"n": 2})
        checkpoints.wait()

    with monkeypatch.context() as patch:
        patch.setattr(writer, place, fail)
        with pytest.raises(
            RuntimeError,
            match=r"step_2 could not be saved .*No space left on device'?; the training state is "
            r"untouched and step_1 is the latest",
        ):
            save()
    assert [path.name for path in root.iterdir()] == ["step_1"]
    assert same(values(model), before)
    save()
    assert checkpoints.steps() == [2]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB, where mounting one is allowed."""
    point = tmp_path / "disk"
    point.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(point)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        yield point
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=True)


def test_disk_that_fills_up_keeps_the_last_checkpoint(
    small_disk: Path, mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
):
    model, optimizer = build(mesh, seed=0)
    checkpoints = CheckpointStore(small_disk / "checkpoints")
    checkpoints.save(1, model, optimizer, {})
    before = values(model)

    def fill_disk() -> None:
        for step in range(2, 50):
            checkpoints.save(step, model, optimizer, {})

    with pytest.raises(RuntimeError, match=r"could not be saved in .*No space left on device"):
        fill_disk()
    assert f"MiB are free in {checkpoints.root}" in caplog.text
    (last, *_) = sorted(checkpoints.steps(), reverse=True)
    assert 1 <= last < 49
    assert len(list(checkpoints.root.iterdir())) == last, "nothing is left of the failed one"
    checkpoints.load(last, model, optimizer)
    assert same(values(model), before)


class Killed(BaseException):
    """What no handler takes for a failure, as a SIGKILL."""


def kill_at(patch: pytest.MonkeyPatch, moment: int) -> list[str]:
    """Stop at the given call of what changes folders; return the calls that were made."""
    calls: list[str] = []

    def guard(name: str, real):
        def guarded(*args, **kwargs):
            if len(calls) == moment:
                raise Killed
            calls.append(name)
            return real(*args, **kwargs)

        return guarded

    patch.setattr(Path, "rename", guard("rename", Path.rename))
    patch.setattr(Path, "mkdir", guard("mkdir", Path.mkdir))
    patch.setattr("shutil.rmtree", guard("rmtree", shutil.rmtree))
    for name in ("write_shards", "write_manifest", "write_companions"):
        patch.setattr(writer, name, guard(name, getattr(writer, name)))
    return calls


def test_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(
    tmp_path: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
):
    model, optimizer = build(mesh, seed=0)
    saved = values(model)
    for step in (1, 2):
        CheckpointStore(tmp_path / "before").save(step, model, optimizer, {"branch": "old"})
    num_kills = 0
    for moment in range(99):
        root = shutil.copytree(tmp_path / "before", tmp_path / str(moment))
        checkpoints = CheckpointStore(root, keep_last=1)
        with monkeypatch.context() as patch:
            kill_at(patch, moment)
            try:
                checkpoints.save(2, model, optimizer, {"branch": "new"})
                checkpoints.save(3, model, optimizer, {"branch": "new"})
                killed = False
            except Killed:
                killed, num_kills = True, num_kills + 1
        fresh = CheckpointStore(root)
        with torch.no_grad():
            model.get_parameter("model.norm.weight").zero_()
        latest = fresh.latest()
        assert latest in (2, 3)
        fresh.load(latest, model, optimizer)
        assert same(values(model), saved)
        if not killed:
            break
    assert num_kills > 12
    assert fresh.steps() == [3]


@pytest.mark.parametrize("bad", [{1, 2}, float("nan")], ids=["set", "nan"])
def test_progress_that_is_not_json_fails_before_anything_is_written(
    root: Path, mesh: DeviceMesh, bad: object
):
    model, optimizer = build(mesh, seed=0)
    with pytest.raises(RuntimeError, match=r"step_1 could not be saved .*not plain JSON"):
        CheckpointStore(root).save(1, model, optimizer, {"bad": bad})
    assert not root.exists()


MISFITS = {
    "other-shapes": (
        {"sizes": {"hidden_size": 48}},
        r"it is of another model: hidden_size is 32 there and 48 here",
    ),
    "other-routing": (
        {"sizes": {"num_experts_per_tok": 1}},
        r"it is of another model: num_experts_per_tok is 2 there and 1 here",
    ),
    "other-optimizer": (
        {"optim": OPTIMIZERS["sgd"]},
        r"its optimizer is AdamW, this run's is SGD \(optim\.type\)",
    ),
}


@pytest.mark.parametrize(("other", "message"), MISFITS.values(), ids=MISFITS.keys())
def test_checkpoint_of_something_else_is_refused_by_name(
    root: Path, mesh: DeviceMesh, other: dict, message: str
):
    CheckpointStore(root).save(1, *build(mesh, seed=0), {})
    model, optimizer = build(
        mesh, 1, other.get("optim", OPTIMIZERS["adamw"]), **other.get("sizes", {})
    )
    before = values(model)
    with pytest.raises(UserError, match=message):
        CheckpointStore(root).load(1, model, optimizer)
    assert same(values(model), before)


def test_optimizer_of_another_name_with_the_same_state_loads(root: Path, mesh: DeviceMesh):
    model, optimizer = build(mesh, 0, OPTIMIZERS["muon"])
    train_step(model, optimizer)
    CheckpointStore(root).save(1, model, optimizer, {})
    other, other_optimizer = build(mesh, 1, OPTIMIZERS["muon"])
    other_optimizer.__class__ = type("DionMuon", (type(other_optimizer),), {})
    CheckpointStore(root).load(1, other, other_optimizer)
    assert same(values(other), values(model))
    assert {group["step"] for group in other_optimizer.param_groups} == {1}


def test_missing_and_extra_tensors_are_refused_by_name(root: Path, mesh: DeviceMesh):
    model, optimizer = build(mesh, seed=0)
    model.register_buffer("offset", torch.zeros(3))
    CheckpointStore(root).save(1, model, optimizer, {})
    other, other_optimizer = build(mesh, seed=1)
    other.register_buffer("scale", torch.ones(3))
    before = values(other)
    with pytest.raises(
        UserError,
        match=r"model: it has model\.offset, which this run has not; .*it lacks model\.scale",
    ):
        CheckpointStore(root).load(1, other, other_optimizer)
    assert same(values(other), before)


def test_other_trained_parameters_are_refused_by_name(root: Path, mesh: DeviceMesh):
    model, optimizer = build(mesh, seed=0)
    CheckpointStore(root).save(1, model, optimizer, {})
    model.model.embed_tokens.requires_grad_(False)
    fewer = setup_optimizer(OPTIMIZERS["adamw"], model.named_parameters(), mesh)
    with pytest.raises(UserError, match=r"it has model\.embed_tokens\.weight, which this run"):
        CheckpointStore(root).load(1, model, fewer)


def test_truncated_tensor_file_is_refused_before_loading(root: Path, mesh: DeviceMesh):
    model, optimizer = build(mesh, seed=0)
    checkpoints = CheckpointStore(root)
    checkpoints.save(1, model, optimizer, {})
    path = next((root / "step_1").glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-1])
    before = values(model)
    with pytest.raises(UserError, match=r"step_1 is damaged: __0_0\.distcp"):
        checkpoints.load(1, model, optimizer)
    assert same(values(model), before)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("place", range(1, 8))
def test_any_flipped_bit_of_a_tensor_is_found_before_loading(
    root: Path, mesh: DeviceMesh, place: int
):
    model, optimizer = build(mesh, seed=0)
    checkpoints = CheckpointStore(root)
    checkpoints.save(1, model, optimizer, {})
    values_of = read_index(root / "step_1").storage_data
    info = sorted(values_of.values(), key=lambda info: info.offset)[place]
    flip(root / "step_1" / info.relative_path, info.offset + info.length // 2)
    before = values(model)
    with pytest.raises(UserError, match=r"step_1 is damaged: the checksums of .* do not agree"):
        checkpoints.load(1, model, optimizer)
    assert same(values(model), before)


def test_tensors_of_a_file_that_cannot_be_opened_count_as_damaged(root: Path, mesh: DeviceMesh):
    # Not an OSError: one rank would raise it while the others wait for that rank's answer.
    CheckpointStore(root).save(1, *build(mesh, seed=0), {})
    index = read_index(root / "step_1")
    next((root / "step_1").glob("*.distcp")).unlink()
    with pytest.raises(UserError, match=r"step_1 is damaged: the checksums of .* do not agree"):
        check_tensors_alone(root / "step_1", index, "")


@pytest.mark.parametrize("name", [".metadata", "hf/config.json", "manifest.json"])
def test_a_flipped_bit_beside_the_tensors_is_found(root: Path, mesh: DeviceMesh, name: str):
    model, optimizer = build(mesh, seed=0)
    checkpoints = CheckpointStore(root)
    checkpoints.save(1, model, optimizer, {})
    flip(root / "step_1" / name, 40)
    with pytest.raises(UserError, match=f"{name} .*damaged|damaged: {name}"):
        checkpoints.load(1, model, optimizer)


def test_a_renamed_checkpoint_is_refused(root: Path, mesh: DeviceMesh):
    checkpoints = CheckpointStore(root)
    checkpoints.save(1, *build(mesh, seed=0), {})
    (root / "step_1").rename(root / "step_7")
    with pytest.raises(UserError, match=r"step_7 holds the checkpoint of step 1: .* to step_1"):
        checkpoints.read_progress(7)


def test_change_of_thread_count_is_logged(
    root: Path, mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
):
    model, optimizer = build(mesh, seed=0)
    checkpoints = CheckpointStore(root)
    checkpoints.save(1, model, optimizer, {})
    path = root / "step_1" / "manifest.json"
    content = json.loads(path.read_text()) | {"num_threads": 77}
    del content["checksum"]
    path.write_text(json.dumps(content))
    with caplog.at_level(logging.WARNING):
        checkpoints.load(1, model, optimizer)
    assert f"threads a rank 77 -> {torch.get_num_threads()}" in caplog.text
