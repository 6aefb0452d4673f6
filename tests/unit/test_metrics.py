import contextlib
import json

import pytest
import wandb

from trainer.config.run import WandbConfig
from trainer.errors import UserError
from trainer.metrics import MetricsWriter


def read(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write(folder, steps, resume_step=None):
    config = WandbConfig(enabled=False)
    with MetricsWriter(folder, config, {}, resume_step=resume_step) as writer:
        for step in steps:
            writer.write(step, {"loss/mean": float(step)})


def test_one_object_a_step(tmp_path):
    write(tmp_path, range(1, 4))
    assert [record["step"] for record in read(tmp_path)] == [1, 2, 3]
    assert read(tmp_path)[1] == {"step": 2, "loss/mean": 2.0}


def test_a_resume_cuts_to_the_checkpoint_and_repeats_no_step(tmp_path):
    write(tmp_path, range(1, 6))
    write(tmp_path, range(4, 6), resume_step=3)
    assert [record["step"] for record in read(tmp_path)] == [1, 2, 3, 4, 5]


def test_a_half_written_line_is_cut(tmp_path):
    write(tmp_path, range(1, 4))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    write(tmp_path, [4], resume_step=3)
    assert [record["step"] for record in read(tmp_path)] == [1, 2, 3, 4]


def test_lines_that_are_no_records_are_cut(tmp_path):
    write(tmp_path, [1, 2])
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{}\n[1]\n{"step": "3"}\n' + b"\xff\xfe" + b"1" * 5000)
    write(tmp_path, [3], resume_step=2)
    assert [record["step"] for record in read(tmp_path)] == [1, 2, 3]


def test_the_last_line_takes_what_is_measured_later(tmp_path):
    write(tmp_path, [1, 2])
    with MetricsWriter(tmp_path, WandbConfig(enabled=False), {}, resume_step=2) as writer:
        writer.amend(2, {"val/loss": 0.5})
        writer.write(3, {"loss/mean": 3.0})
    assert [record["step"] for record in read(tmp_path)] == [1, 2, 3]
    assert read(tmp_path)[1] == {"step": 2, "loss/mean": 2.0, "val/loss": 0.5}


def test_a_value_that_is_not_finite_becomes_null(tmp_path):
    with MetricsWriter(tmp_path, WandbConfig(enabled=False), {}) as writer:
        writer.write(1, {"loss/mean": float("nan"), "optim/grad_norm": float("inf")})
    assert read(tmp_path) == [{"step": 1, "loss/mean": None, "optim/grad_norm": None}]


def test_without_a_key_wandb_runs_offline_and_says_so(tmp_path, monkeypatch, caplog):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    with caplog.at_level("INFO"), MetricsWriter(tmp_path, WandbConfig(), {"seed": 1}) as writer:
        writer.write(1, {"loss/mean": 1.0})
    assert "wandb runs offline" in caplog.text
    assert list((tmp_path / "wandb").glob("offline-run-*"))
    assert read(tmp_path) == [{"step": 1, "loss/mean": 1.0}]


def test_resumes_share_one_wandb_id(tmp_path):
    ids = []
    for resume_step in (None, 1):
        with MetricsWriter(tmp_path, WandbConfig(), {}, resume_step=resume_step) as writer:
            writer.write(len(ids) + 1, {"loss/mean": 1.0})
        ids.append((tmp_path / "wandb_id").read_text())
    assert ids[0] == ids[1]


def test_every_field_of_the_section_reaches_wandb(tmp_path, monkeypatch):
    asked: dict[str, object] = {}
    init = wandb.init

    def spy(**arguments: object) -> object:
        asked.update(arguments)
        return init(mode="disabled")

    monkeypatch.setattr(wandb, "init", spy)
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = WandbConfig(project="p", entity="e", name="n", tags=("a", "b"))
    MetricsWriter(tmp_path, config, {"seed": 1}).close()
    wanted = {"project": "p", "entity": "e", "name": "n", "tags": ["a", "b"], "config": {"seed": 1}}
    assert {key: asked[key] for key in wanted} == wanted


class FakeRun:
    status: int | None = None

    def define_metric(self, name: str, step_metric: str = "") -> None:
        pass

    def finish(self, exit_code: int) -> None:
        self.status = exit_code


@pytest.mark.parametrize("failure", [None, RuntimeError("broken")], ids=["done", "failed"])
def test_wandb_is_told_whether_the_run_failed(tmp_path, monkeypatch, failure):
    run = FakeRun()
    monkeypatch.setattr(wandb, "init", lambda **_: run)
    monkeypatch.setenv("WANDB_MODE", "offline")
    expected = contextlib.nullcontext() if failure is None else pytest.raises(RuntimeError)
    with expected, MetricsWriter(tmp_path, WandbConfig(), {}):
        if failure is not None:
            raise failure
    assert run.status == (0 if failure is None else 1)


@pytest.mark.parametrize("wrong", [{"project": "a/b"}, {"tags": ("x" * 99,)}], ids=["name", "tag"])
def test_what_wandb_refuses_is_a_users_error(tmp_path, monkeypatch, wrong):
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(UserError, match="wandb refused the run"):
        MetricsWriter(tmp_path, WandbConfig(**wrong), {})


def test_wandb_is_left_alone_when_it_is_not_enabled(tmp_path, monkeypatch):
    monkeypatch.setattr(wandb, "init", lambda **_: pytest.fail("wandb was started"))
    MetricsWriter(tmp_path, WandbConfig(enabled=False), {}).close()
    assert not (tmp_path / "wandb").exists()


@pytest.mark.parametrize("start", [0, 3])
def test_the_display_prints_plain_lines_without_a_terminal(start, capsys):
    from trainer.loops.display import Display

    with Display(4, start, "SFT") as display:
        display.step(start + 1, {"loss/mean": 0.5, "val/loss": None})
    assert f"step {start + 1}/4  loss 0.5000" in capsys.readouterr().out
