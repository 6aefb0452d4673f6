"""From rows to packed batches.

A row (`rows`) of a source (`sources`, `jsonl`, `reasoning_gym`) is drawn in one global order
(`order`), rendered (`chat`), tokenized and masked (`encode`), kept or left out (`reader`) and
packed (`packing`) into an endless stream (`stream`, `prefetch`). Validation is set apart in
`held_out`. Start with `setup`. Pretraining reads documents instead of rows: see `text` and
`shards`.
"""

from trainer.data.packing import (
    MASKED,
    Document,
    Pack,
    PackedBatch,
    collate,
    deal,
    micro_batches,
    pack_fill,
)
from trainer.data.setup import HeldOut, SFTData, setup_sft_data
from trainer.data.stream import SFTStream
from trainer.data.tokenizer import build_byte_tokenizer, setup_tokenizer

__all__ = [
    "MASKED",
    "Document",
    "HeldOut",
    "Pack",
    "PackedBatch",
    "SFTData",
    "SFTStream",
    "build_byte_tokenizer",
    "collate",
    "deal",
    "micro_batches",
    "pack_fill",
    "setup_sft_data",
    "setup_tokenizer",
]
