"""`make demo-rl` from its start to its report, a step each."""

import importlib.util
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "demo_rl.py"


def test_the_demo_chooses_a_start_trains_from_it_and_reports(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("demo_rl", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    run = demo.trainer

    def short(args: list[str]) -> int:
        few = ["--max-steps", "1", "--rollout.num-prompts", "2", "--rollout.num-samples", "2"]
        return run([*args, *few] if args[0] == "rl" else args)

    monkeypatch.setattr(demo, "trainer", short)
    monkeypatch.setattr(demo, "LOWEST", 0.0)
    monkeypatch.setattr(demo, "TARGET", 0.0)
    monkeypatch.setitem(demo.START_FLAGS, "max-steps", "2")
    out, start = tmp_path / "rewarded", tmp_path / "start"
    monkeypatch.setattr(sys, "argv", ["demo_rl.py", "--start", str(start), "--out", str(out)])
    assert demo.main() == 0
    printed = capsys.readouterr().out
    assert f"start: {start}/weights/step_2, held-out pass rate 0.0" in printed
    assert "(target 0.0) in 1 steps" in printed
    assert (out / "rewards.png").exists()
