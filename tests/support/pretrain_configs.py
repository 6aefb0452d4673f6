"""Tiny configs of pretraining: a network of random weights on two small sources."""

from pathlib import Path
from typing import Any

from tests.support.tables import changed, tiny_model
from tests.support.texts import texts, write_jsonl_texts
from trainer.config import PretrainConfig


def pretrain_config(folder: Path, corpus: Path, **changes: Any) -> PretrainConfig:
    """Return a run of a few seconds on `corpus` (`write_corpus`).

    Args:
        folder: Of the run.
        corpus: Of the text.
        changes: As `changed` takes them.
    """
    table: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 3,
        "model": tiny_model(),
        "optim": {"type": "muon", "ns_dtype": "float32", "lr": 0.02},
        "data": {"seq_len": 64, "batch_size": 5, "source": mix_of(corpus)},
        "val": {"fraction": 0.2, "max_packs": 3},
        "parallel": {"device": "cpu"},
        "wandb": {"enabled": False},
    }
    return PretrainConfig.model_validate(changed(table, changes))


def write_corpus(folder: Path) -> Path:
    """Write two sources of text; returns the folder."""
    write_jsonl_texts(folder / "words.jsonl", texts(60, "words", 90))
    (folder / "lines.txt").write_text("".join(f"{i} squared is {i * i}\n" for i in range(300)))
    return folder


def mix_of(corpus: Path) -> dict[str, Any]:
    """Return the mix of a corpus' sources, 3 : 2."""
    return {
        "type": "mix",
        "sources": [
            {"type": "files", "path": str(corpus / "words.jsonl"), "weight": 3.0},
            {"type": "files", "path": str(corpus / "lines.txt"), "block_kib": 1, "weight": 2.0},
        ],
    }
