"""Opens the sources of a pretraining run.

Owns how a file is read and what a source is called. Reads no documents.
"""

import sysconfig
from pathlib import Path

from trainer.config.pretrain import (
    HubTextSource,
    PretrainMixSource,
    PretrainSource,
    SinglePretrainSource,
    StdlibSource,
    TextFilesSource,
    TokensSource,
)
from trainer.data.file_tree import existing, files_under
from trainer.data.shards.manifest import read_manifest
from trainer.data.shards.reader import TokenPages, check_shards
from trainer.data.text.blocks import SkippedRows, TextFormat
from trainer.data.text.compressed import GZIP, ZSTD, CompressedPages
from trainer.data.text.encode import TokenizerIdentity
from trainer.data.text.files import FileBlocks, FilePages
from trainer.data.text.hub import TablePages, open_hub
from trainer.data.text.pages import NumberedPages, PagedSource, Shuffle
from trainer.data.text.parquet import ParquetPages
from trainer.data.text.settings import COMMAND_LINE, setting
from trainer.errors import UserError

PARQUET = ".parquet"
UNREAD = (
    *(".7z", ".br", ".bz2", ".lz4", ".lzma", ".rar", ".snappy", ".tar", ".tgz", ".txz", ".tzst"),
    *(".xz", ".z", ".zip", ".zstd", ".parquet.gz", ".parquet.zst", ".tar.gz", ".tar.zst"),
)
"""Packed in ways that would be read as text that makes no sense."""
OTHER_LOSSES = {"mean", "perplexity", "load_balancing"}
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
STDLIB_BLOCK_BYTES = 1 << 18


def single_sources(source: PretrainSource) -> tuple[SinglePretrainSource, ...]:
    """Return the sources of a mix, or the one source."""
    return source.sources if isinstance(source, PretrainMixSource) else (source,)


def source_fields(source: PretrainSource, field: str) -> list[str]:
    """Return each source's name in the config."""
    if isinstance(source, PretrainMixSource):
        return [f"{field}.sources[{index}]" for index in range(len(source.sources))]
    return [field]


def source_names(source: PretrainSource) -> list[str]:
    """Return the name under which each source is logged.

    Equal names, and those that would hide another `loss/…`, get their number in the mix.
    """
    names = [_own_name(part) for part in single_sources(source)]
    unique: list[str] = []
    for index, name in enumerate(names):
        if names.count(name) > 1 or name in OTHER_LOSSES:
            while name in {*names, *OTHER_LOSSES, *unique}:
                name = f"{name}-{index}"
        unique.append(name)
    return unique


def open_source(
    source: SinglePretrainSource, field: str, shuffle: Shuffle, identity: TokenizerIdentity
) -> PagedSource:
    """Open one source without reading its documents.

    Args:
        source: from the config.
        field: its name there, for messages.
        shuffle: of this source.
        identity: of the run's tokenizer; token shards must be of the same.

    Raises:
        UserError: it does not exist, holds nothing, or its token shards are incomplete or of
            another tokenizer.
    """
    match source:
        case TextFilesSource():
            return open_files(source, field, shuffle)
        case StdlibSource():
            return FilePages(FileBlocks(stdlib_files(), STDLIB_BLOCK_BYTES), TextFormat(), shuffle)
        case HubTextSource():
            return open_hub(source, field, shuffle)
        case TokensSource():
            folder = Path(source.path)
            manifest = read_manifest(folder, field)
            check_shards(folder, manifest, field, identity, verify=source.verify)
            return TokenPages(folder, manifest, shuffle)


def open_files(source: TextFilesSource, field: str, shuffle: Shuffle) -> NumberedPages:
    """Open a file or folder; arguments and errors as `open_source`."""
    given = f"{setting(field, 'path')}={source.path!r}"
    path = existing(source.path, given)
    suffixes = setting(field, "suffixes")
    files = files_under(path, source.suffixes, field) if path.is_dir() else [path]
    kinds = {_kind(file, field) for file in files}
    skipped = SkippedRows() if source.on_bad_row == "skip" else None
    rows = TextFormat(column=source.column, skipped=skipped, field=field)
    block_bytes = source.block_kib * 1024
    match sorted(kinds):
        case ["Parquet"]:
            pages = ParquetPages(files, source.column, shuffle, field)
            if pages.groups:
                return pages
        case ["compressed"]:
            return CompressedPages(files, block_bytes, rows, shuffle)
        case ["plain"]:
            blocks = FileBlocks(files, block_bytes)
            if len(blocks):
                return FilePages(blocks, rows, shuffle)
        case [_, *_] as several:
            raise UserError(
                f"{given} holds {' and '.join(several)} files: choose one kind with {suffixes}, or "
                "make each a source of its own"
            )
    raise UserError(
        f"{given} has no text in files that end in {', '.join(source.suffixes)}: give files with "
        f"text, or other {suffixes}"
    )


def _kind(file: Path, field: str) -> str:
    """Return how a file is read.

    Raises:
        UserError: its name says that it is packed in a way that is not read.
    """
    name = file.name.lower()
    if name.endswith(UNREAD):
        raise UserError(
            f"{field}: {file} is packed in a way that is not read: unpack it, or pack its text "
            f"with gzip ({GZIP}) or zstd ({ZSTD})"
        )
    if name.endswith(PARQUET):
        return "Parquet"
    return "compressed" if name.endswith((GZIP, ZSTD)) else "plain"


def open_numbered(source: TextFilesSource | StdlibSource | HubTextSource) -> NumberedPages:
    """Open text whose pages can be read in any order, as it lies; for `trainer tokenize`.

    Raises:
        UserError: as `open_source`, or the source is a stream.
    """
    field, shuffle = COMMAND_LINE, Shuffle(None)
    match source:
        case TextFilesSource():
            return open_files(source, field, shuffle)
        case StdlibSource():
            return FilePages(FileBlocks(stdlib_files(), STDLIB_BLOCK_BYTES), TextFormat(), shuffle)
        case HubTextSource():
            pages = open_hub(source, field, shuffle)
            if isinstance(pages, TablePages):
                return pages
            raise UserError(f"{field}: a stream cannot be split among processes: download it")


def stdlib_files() -> list[Path]:
    """Return the Python files of this interpreter's standard library, without tests, in order."""
    return files_under(Path(sysconfig.get_path("stdlib")), (".py",), "stdlib", NOT_LIBRARY)


def _own_name(source: SinglePretrainSource) -> str:
    if source.name is not None:
        return source.name
    match source:
        case StdlibSource():
            return "stdlib"
        case HubTextSource():
            return source.path.rstrip("/").rpartition("/")[2]
        case _:
            return Path(source.path).resolve().stem
