"""A run small enough for tests: two steps of a tiny mixture of experts on local rows."""

import json
from pathlib import Path
from typing import Any

from tests.support.rows import chat_row

CONFIG = """
output_dir = "{folder}/run"
max_steps = 2
[model]
weights = "random"
compute_dtype = "float32"
[model.architecture]
type = "qwen3_moe"
vocab_size = 320
hidden_size = 32
intermediate_size = 32
moe_intermediate_size = 16
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
num_experts = 4
num_experts_per_tok = 2
max_position_embeddings = 256
[optim]
type = "muon"
ns_dtype = "float32"
[data]
seq_len = 128
batch_size = 2
[data.source]
type = "files"
path = "{folder}/rows.jsonl"
[parallel]
device = "cpu"
[wandb]
enabled = false
"""


def row(question: str = "hello", answer: str = "olleh") -> dict[str, Any]:
    """Return one training row."""
    return chat_row(question, answer)


def write_tiny_run(folder: Path, lines: list[str] | None = None) -> list[str]:
    """Write a config and its rows into `folder`; return the words that launch it.

    Args:
        folder: Also takes the output folder `run`.
        lines: Lines of the JSONL file; None: a few good ones.
    """
    if lines is None:
        lines = [json.dumps(row(f"hello {i}", f"{i} olleh")) for i in range(16)]
    (folder / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "config.toml").write_text(CONFIG.format(folder=folder))
    return ["sft", "@", str(folder / "config.toml")]
