"""Tiny configs of RL: a network of random weights, prompts from a task or a file."""

from pathlib import Path
from typing import Any

from tests.support.rows import write_jsonl
from tests.support.tables import changed, tiny_model
from trainer.config import RLConfig
from trainer.rl.rewards import Sample


def rl_config(folder: Path, **changes: Any) -> RLConfig:
    """Return a run of a few seconds on spell_backward; `changes` replace keys of sections.

    Args:
        folder: Of the run.
        changes: As `changed` takes them.
    """
    return RLConfig.model_validate(changed(_base(folder), changes))


def part_ascii(sample: Sample) -> float:
    """Reward ASCII characters: with the built-in tokenizer, 0.4 of random ones."""
    return sum(character < "\x80" for character in sample.completion) / 8


PART_ASCII = {"type": "function", "path": f"{__name__}:part_ascii"}


def prompts_file(folder: Path, rows: list[dict[str, Any]]) -> dict[str, str]:
    """Write rows of prompts; return the source that reads them."""
    return {"type": "files", "path": str(write_jsonl(folder / "prompts.jsonl", rows))}


def _base(folder: Path) -> dict[str, Any]:
    task = {"type": "reasoning_gym", "task": "spell_backward", "params": {"max_word_len": 5}}
    return {
        "output_dir": str(folder),
        "max_steps": 2,
        "model": tiny_model(initializer_range=0.1),
        "optim": {"type": "muon", "lr": 0.002, "ns_dtype": "float32"},
        "env": {"source": task | {"size": 60, "template": "{word}"}},
        "rollout": {"num_prompts": 4, "num_samples": 3, "max_new_tokens": 6, "batch_size": 6},
        "data": {"seq_len": 64, "micro_batch_size": 2},
        "val": {
            "source": task | {"size": 12, "start": 60, "template": "{word}"},
            "num_prompts": 5,
        },
        "wandb": {"enabled": False},
    }
