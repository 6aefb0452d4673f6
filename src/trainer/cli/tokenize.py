"""`trainer tokenize SRC DST`: token shards from text, in parallel, resumable."""

import os
from collections.abc import Mapping
from pathlib import Path

from trainer.cli.words import place, split_words
from trainer.config.pretrain import (
    TEXT_SUFFIXES,
    HubTextSource,
    StdlibSource,
    TextFilesSource,
)
from trainer.errors import UserError

USAGE = """\
usage: trainer tokenize SRC DST [--tokenizer NAME] [--workers N] [--shard-mib N] [--column NAME]
                                [--suffixes .txt,.jsonl,.parquet] [--on-bad-row skip]
                                [--subset NAME] [--split NAME]

Tokenizes SRC (a file or folder of text or JSONL, also as .gz or .zst, or of Parquet; hub:NAME, a
data set of the hub; stdlib:, Python's own sources) into the folder DST of token shards, which a run
reads with data.source = { type = "tokens", path = DST }. Run again after an interruption, it makes
only what is missing.

  --tokenizer   folder or hub name; without it the built-in byte-level tokenizer
  --workers     processes; without it one a CPU core
  --shard-mib   MiB of text in a shard, about (default 256); no shard is smaller than what is read
                at once: 16 MiB of plain text or Parquet, a whole .gz or .zst file
  --column      field of a row that holds the text (default text)
  --suffixes    files of a folder that are read (default text, JSONL, the two as .gz or .zst,
                and Parquet; a folder must hold one kind)
  --on-bad-row  error or skip: a JSONL row that is no JSON or has no text (default error)
  --subset, --split   of a data set of the hub (default split train)"""

OPTIONS = {
    "tokenizer": "",
    "workers": str(os.cpu_count() or 1),
    "shard-mib": "256",
    "column": "text",
    "suffixes": ",".join(TEXT_SUFFIXES),
    "on-bad-row": "error",
    "subset": "",
    "split": "train",
}


def tokenize_command(args: list[str]) -> None:
    """Run `trainer tokenize`.

    Raises:
        UserError: words are missing or not understood, or the source cannot be tokenized.
    """
    if "--help" in args or "-h" in args:
        print(USAGE)
        return
    words = split_words(args, OPTIONS)
    if len(words.places) != 2:
        raise UserError(
            f"tokenize takes a source and a folder, SRC and DST, {len(words.places)} given; write "
            "'trainer tokenize corpus/ shards/'"
        )
    source, folder = words.places
    if source in ("", "hub:"):
        raise UserError(f"SRC={source!r} names no source: give a file, a folder or hub:NAME")
    num_workers = _count("workers", words.options)
    shard_bytes = _count("shard-mib", words.options) << 20
    from trainer.data.shards.job import TokenizeRequest
    from trainer.data.shards.writer import tokenize

    manifest = tokenize(
        TokenizeRequest(
            source=_parse_source(source, words.options),
            folder=Path(place("DST", folder)),
            tokenizer=place("--tokenizer", words.options["tokenizer"]) or None,
            num_workers=num_workers,
            shard_bytes=shard_bytes,
        )
    )
    totals = manifest.to_json()
    print(
        f"{totals['num_documents']:,} documents, {totals['num_tokens']:,} tokens of "
        f"{totals['num_bytes']:,} bytes in {len(manifest.shards)} shards, {manifest.dtype}\n"
        f'read them with data.source = {{ type = "tokens", path = "{folder}" }}'
    )


def _parse_source(
    text: str, options: Mapping[str, str]
) -> TextFilesSource | StdlibSource | HubTextSource:
    if text == "stdlib:":
        return StdlibSource()
    if text.startswith("hub:"):
        return HubTextSource(
            path=text.removeprefix("hub:"),
            subset=options["subset"] or None,
            split=options["split"],
            column=options["column"],
        )
    suffixes = tuple(filter(None, options["suffixes"].split(",")))
    if not suffixes:
        raise UserError(f"--suffixes {options['suffixes']!r}: names no suffix; write '.txt,.jsonl'")
    match options["on-bad-row"]:
        case "error" | "skip" as on_bad_row:
            return TextFilesSource(
                path=place("SRC", text),
                suffixes=suffixes,
                column=options["column"],
                on_bad_row=on_bad_row,
            )
        case other:
            raise UserError(f"--on-bad-row {other}: must be error or skip; correct it")


def _count(name: str, options: Mapping[str, str]) -> int:
    text = options[name]
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UserError(f"--{name} {text}: must be an integer of at least 1; correct it")
    return int(text)
