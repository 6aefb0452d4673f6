"""Tiny configs of RL: a network of random weights, prompts from a task or a file."""

from pathlib import Path
from typing import Any

from tests.support.rows import write_jsonl
from trainer.config import RLConfig
from trainer.rl.rewards import Sample


def rl_config(folder: Path, **changes: Any) -> RLConfig:
    """Return a run of a few seconds on spell_backward; `changes` replace keys of sections.

    Args:
        folder: Of the run.
        changes: Values of top-level fields; tables are merged into their sections, but one that
            names a `type` takes the section's place.
    """
    table = _base(folder)
    for name, value in changes.items():
        merges = isinstance(value, dict) and "type" not in value and name in table
        table[name] = table[name] | value if merges else value
    return RLConfig.model_validate(table)


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
        "model": {
            "weights": "random",
            "compute_dtype": "float32",
            "load_balancing_coef": 0.01,
            "architecture": {
                "type": "qwen3_moe",
                "vocab_size": 320,
                "hidden_size": 32,
                "intermediate_size": 48,
                "moe_intermediate_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "initializer_range": 0.1,
            },
        },
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
