"""What pretraining data cost: rates in CPU time, memory and the price of going to a position.

    python -m scripts.study.data_rates --out outputs/data_rates             about two minutes
    python -m scripts.study.data_rates --out outputs/data_rates --mib 1     in short, as CI runs

The text is the standard library's, repeated up to `--mib`. CPU seconds of this process, all its
threads together, so that what else the machine does hardly matters. Prints a table; the last line
is one JSON object, which `--out` also gets. Not covered: disks and networks, as all is in cache.
"""

import argparse
import gzip
import json
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from scripts.bench.records import describe_environment
from trainer.config.pretrain import PretrainDataConfig, PretrainValConfig, TextFilesSource
from trainer.data import build_byte_tokenizer
from trainer.data.shards.job import TokenizeRequest
from trainer.data.shards.writer import tokenize
from trainer.data.text.pages import Shuffle
from trainer.data.text.setup import setup_pretrain_data
from trainer.data.text.sources import open_files, stdlib_files

SPARSE_FILES, SPARSE_BYTES = 4000, 1 << 28
SEQ_LEN = 2048
VOCABULARY = 8000


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", required=True, help="folder for the corpus and the results")
    parser.add_argument("--mib", type=int, default=32, help="MiB of text")
    arguments = parser.parse_args()
    out = Path(arguments.out)
    shutil.rmtree(out / "work", ignore_errors=True)
    work = out / "work"
    # First, while the process is small: what opening adds to its peak shows only then.
    opened = opening(work)
    texts = write_corpus(work, arguments.mib << 20)
    rates = {**tokenizing(work, texts), **reading(work, texts), **opened, **resuming(work)}
    shutil.rmtree(work)
    record = {**describe_environment(torch.device("cpu")), "mib": arguments.mib, **rates}
    for name, value in rates.items():
        print(f"| {name} | {value:,.4g} |")
    (out / "data_rates.json").write_text(json.dumps(record) + "\n")
    print(json.dumps(record))


def write_corpus(work: Path, num_bytes: int) -> list[str]:
    """Write the same rows plain and packed, each into a folder of its own; return the texts."""
    texts = list(_documents(num_bytes))
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    for name in ("plain", "gzip", "zstd"):
        (work / name).mkdir(parents=True)
    (work / "plain" / "a.jsonl").write_bytes(rows)
    (work / "gzip" / "a.jsonl.gz").write_bytes(gzip.compress(rows, compresslevel=6))
    with pyarrow.output_stream(str(work / "zstd" / "a.jsonl.zst"), compression="zstd") as file:
        file.write(rows)
    return texts


def tokenizing(work: Path, texts: list[str]) -> dict[str, float]:
    """Return the rates of `trainer tokenize` in one process, MB of text a second."""
    bpe = work / "bpe"
    train_bpe(texts).save_pretrained(bpe)
    source = TextFilesSource(path=str(work / "plain"))
    num_bytes = sum(len(text.encode()) for text in texts)
    rates = {}
    for name, folder in ((f"BPE of {VOCABULARY:,} tokens", str(bpe)), ("byte-level", None)):
        request = TokenizeRequest(source, work / f"shards {name}", folder, 1, 1 << 28)
        seconds = cpu_seconds(lambda request=request: tokenize(request, lambda line: None))
        rates[f"tokenizing, {name}, MB/s"] = num_bytes / seconds / 1e6
    return rates


def reading(work: Path, texts: list[str]) -> dict[str, float]:
    """Return the rates of training streams with byte-level tokens, million tokens a second."""
    num_packs = sum(len(text.encode()) for text in texts) // SEQ_LEN
    rates = {}
    for name in ("tokens", "plain", "gzip", "zstd"):
        stream = open_stream(work, name)
        seconds = cpu_seconds(lambda stream=stream: stream.next_packs(num_packs))
        rates[f"stream from {name}, million tokens/s"] = num_packs * SEQ_LEN / seconds / 1e6
    return rates


def opening(work: Path) -> dict[str, float]:
    """Return what it takes to open a tebibyte of JSONL; the files have sizes and no content."""
    folder = work / "sparse"
    folder.mkdir(parents=True)
    for index in range(SPARSE_FILES):
        with (folder / f"{index:05d}.jsonl").open("wb") as file:
            file.truncate(SPARSE_BYTES)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    source = TextFilesSource(path=str(folder))
    seconds = cpu_seconds(lambda: open_files(source, "data.source", Shuffle("0")))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"opening 1 TiB of JSONL, s": seconds, "more memory for it, MiB": grown / 1024}


def resuming(work: Path) -> dict[str, float]:
    """Return the size of positions in mid-epoch, and the seconds to go there."""
    found: dict[str, float] = {}
    for name in ("tokens", "plain", "gzip", "zstd"):
        stream = open_stream(work, name)
        stream.next_packs(100)
        state = stream.state_dict()
        found[f"position in {name}, bytes"] = len(json.dumps(state))
        fresh = open_stream(work, name)
        going = lambda fresh=fresh, state=state: fresh.load_state_dict(state)  # noqa: E731
        found[f"going there, {name}, s"] = cpu_seconds(going)
    return found


def open_stream(work: Path, name: str) -> Any:
    """Return a training stream of one source, without a thread of its own."""
    source = {"type": "files", "path": str(work / name)}
    if name == "tokens":
        source = {"type": "tokens", "path": str(work / "shards byte-level")}
    fields = {"seq_len": SEQ_LEN, "prefetch": False, "source": source}
    data = PretrainDataConfig.model_validate(fields)
    return setup_pretrain_data(data, PretrainValConfig(), build_byte_tokenizer(), 0).train


def train_bpe(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer trained on the texts."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<eos>"], show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def cpu_seconds(call: Callable[[], Any]) -> float:
    """Return the CPU seconds of a call."""
    began = time.process_time()
    call()
    return time.process_time() - began


def _documents(num_bytes: int) -> Iterator[str]:
    files = [path.read_text(encoding="utf-8", errors="ignore") for path in stdlib_files()]
    while True:
        for text in files:
            num_bytes -= len(text.encode())
            if num_bytes < 0:
                return
            yield text


if __name__ == "__main__":
    main()
