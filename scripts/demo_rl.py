"""`make demo-rl`: a network that answers a third of the questions learns the rest from rewards.

Makes the start once, by a short supervised run of which it takes the first weights whose held-out
pass rate lies in the wanted range; then runs `trainer rl @ configs/rl/demo.toml` from there and
says what became of the pass rate. Ends with 1 if it stayed below the target.
"""

import argparse
import json
import logging
import sys
import time
from pathlib import Path
from statistics import fmean

from trainer.cli.main import main as trainer
from trainer.config import RLConfig, load_config
from trainer.data import setup_tokenizer
from trainer.loops.rl.collect import Collector
from trainer.loops.rl.judge import Judge
from trainer.loops.rl.prompts import setup_prompts, tokenization
from trainer.loops.rl.run import stop_ids
from trainer.model import setup_model
from trainer.model.inference import inference
from trainer.parallel import build_mesh
from trainer.parallel.world import open_world
from trainer.rl.engine import Sampling
from trainer.rl.local import LocalEngine
from trainer.rl.scoring import Scorer

RL = "configs/rl/demo.toml"
SFT = "configs/sft/demo.toml"
LOWEST, HIGHEST, TARGET = 0.25, 0.4, 0.8
"""Held-out pass rates: of the start, and what the run must reach."""
PARAMS = '{"min_word_len": 3, "max_word_len": 5}'
START_FLAGS = {
    "max-steps": "42",
    "scheduler.decay-ratio": "0.3",
    "data.source.template": "{word}",
    "data.source.params": PARAMS,
    "data.seq-len": "256",
    "val.source.template": "{word}",
    "val.source.params": PARAMS,
    "val.num-generate": "0",
    "val.interval": "0",
    "ckpt.weights-interval": "2",
    "ckpt.weights-dtype": "float32",
    "ckpt.resume": "latest",
    "wandb.enabled": "false",
}
"""What the supervised run of the start changes in its own demo."""


def main() -> int:
    """Make the start if it is not there, run, report; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start", type=Path, default=Path("outputs/demo-rl-start"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began = time.monotonic()
    weights = find_start(args.start)
    flags = ["--model.name", str(weights), "--output-dir", str(args.out), "--seed", str(args.seed)]
    status = trainer(["rl", "@", RL, *flags])
    return status or report(args.out, time.monotonic() - began)


def find_start(folder: Path) -> Path:
    """Return weights in the wanted range, from an earlier demo or a supervised run made now."""
    chosen = folder / "chosen.json"
    if not chosen.exists():
        flags = [word for name, value in START_FLAGS.items() for word in (f"--{name}", value)]
        if status := trainer(["sft", "@", SFT, "--output-dir", str(folder), *flags]):
            sys.exit(status)
        chosen.write_text(json.dumps(choose(folder / "weights")) + "\n")
    start = json.loads(chosen.read_text())
    print(f"start: {start['weights']}, held-out pass rate {start['pass_rate']:.3f}")
    return Path(start["weights"])


def choose(folder: Path) -> dict[str, str | float]:
    """Return the first weights of a run whose pass rate is in the range, with that rate."""
    # What a start-up has to say is said by the run itself, not by every candidate.
    logging.getLogger("trainer").setLevel(logging.WARNING)
    for weights in sorted(folder.glob("step_*"), key=lambda path: int(path.name[5:])):
        rate = pass_rate(weights)
        print(f"  {weights.name}: held-out pass rate {rate:.3f}")
        if LOWEST <= rate <= HIGHEST:
            logging.getLogger("trainer").setLevel(logging.NOTSET)
            return {"weights": str(weights), "pass_rate": rate}
    sys.exit(f"no weights in {folder} have a held-out pass rate from {LOWEST} to {HIGHEST}")


def pass_rate(weights: Path) -> float:
    """Return the part of the demo's held-out prompts that weights answer in full, greedily."""
    config, _ = load_config(RLConfig, ["@", RL, "--model.name", str(weights)])
    tokenizer = setup_tokenizer(tokenization(config), config.model.name)
    with open_world(config.parallel) as world:
        model = setup_model(config.model, build_mesh(config.parallel, world.device.type))
        assert isinstance(tokenizer.pad_token_id, int)
        engine = LocalEngine(
            model,
            inference,
            world.device,
            pad_id=tokenizer.pad_token_id,
            batch_size=config.rollout.batch_size,
        )
        sampling = Sampling.from_config(config.rollout, stop_ids(config, tokenizer))
        judge = Judge(config, tokenizer, Scorer.from_config(config.env))
        collector = Collector(config, engine, sampling, judge)
        answers = collector.evaluate(setup_prompts(config, tokenizer).held_out, 0)
    return fmean(answer.is_pass for answer in answers)


def report(folder: Path, seconds: float) -> int:
    """Print what the run did; return 0 if the target was reached."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first, last = lines[0]["val/pass_rate_at_start"], lines[-1]["val/pass_rate"]
    print(
        f"held-out pass rate {first:.3f} -> {last:.3f} (target {TARGET}) in {len(lines)} steps, "
        f"{seconds / 60:.1f} minutes in all\n"
        f"mean reward {lines[0]['reward/mean']:.3f} -> {lines[-1]['reward/mean']:.3f}; "
        f"sampling {fmean(line['rollout/tokens_per_second'] for line in lines):,.0f} tokens/s, "
        f"training {fmean(map(training_rate, lines)):,.0f} tokens/s\n"
        f"plot: {folder / 'rewards.png'}"
    )
    return 0 if last >= TARGET else 1


def training_rate(line: dict[str, float]) -> float:
    """Return the tokens a second of forward, backward and optimizer in one step."""
    num_tokens = line["perf/throughput"] * line["time/step"]
    return num_tokens / (line["time/forward_backward"] + line["time/optimizer"])


if __name__ == "__main__":
    sys.exit(main())
