"""Small corpora, and the parts of a pretraining stream over them."""

import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

from trainer.config.pretrain import PretrainDataConfig, PretrainValConfig
from trainer.data import build_byte_tokenizer
from trainer.data.packing import MASKED, Pack
from trainer.data.text.setup import PretrainData, setup_pretrain_data


def texts(count: int, label: str = "text", length: int = 20) -> list[str]:
    """Return documents of different lengths that name their number."""
    return [f"{label} {i}: " + chr(97 + i % 26) * (1 + i * 7 % length) for i in range(count)]


def write_jsonl_texts(path: Path, documents: list[str]) -> Path:
    """Write one row a document; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def write_parquet_texts(path: Path, documents: list[str], row_group_size: int = 4) -> Path:
    """Write one row a document; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({"text": documents, "id": list(range(len(documents)))})
    pyarrow.parquet.write_table(table, path, row_group_size=row_group_size)
    return path


def pretrain_data(
    source: dict, seed: int = 0, val: dict | None = None, **settings: object
) -> PretrainData:
    """Set up pretraining data with the byte-level tokenizer, small packs and no thread."""
    fields = {"seq_len": 32, "batch_size": 4, "prefetch": False} | settings | {"source": source}
    data = PretrainDataConfig.model_validate(fields)
    val_config = PretrainValConfig.model_validate(val or {})
    return setup_pretrain_data(data, val_config, build_byte_tokenizer(), seed)


def pack_ids(packs: list[Pack]) -> list[list[list[int]]]:
    """Return the ids of every document of every pack."""
    return [[document.ids.tolist() for document in pack.documents] for pack in packs]


def trained_pairs(packs: list[Pack]) -> list[tuple[int, int]]:
    """Return every (token, token predicted from it) in order."""
    pairs = []
    for pack in packs:
        for document in pack.documents:
            trained = np.flatnonzero(document.targets != MASKED)
            pairs += [(int(document.ids[i]), int(document.targets[i])) for i in trained]
    return pairs
