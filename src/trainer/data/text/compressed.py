"""Text and JSONL files packed with gzip or zstd, unpacked as they are read.

Owns reading forward in such a file. It gives the documents that the unpacked file would, page for
page in its own order: files are shuffled, and documents within a page of `PAGE_BLOCKS` blocks.
Going back into the middle of a file unpacks it up to there, whatever came before it. In memory lie
one page, with the whole of its last line, and 24 bytes a file.
"""

import gzip
import io
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow

from trainer.data.text import files
from trainer.data.text.blocks import Block, LongLines, TextFormat, block_texts
from trainer.data.text.pages import Cursor, Page, Shuffle
from trainer.errors import UserError

GZIP = ".gz"
ZSTD = ".zst"
_UNPACKED_PER_PACKED = 4
"""About how many times larger text is, unpacked; only sizes of token shards follow from it."""
_READ_BYTES = 1 << 20


class UnpackedStream(Protocol):
    """A file that is unpacked as it is read."""

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes; none at the end."""
        ...


class CompressedPages:
    """Compressed files; page k of a file owns the documents that begin in its k-th blocks.

    A cursor is (files before it, pages of its file before it); (n,) stands for (n, 0).

    Args:
        paths: in order; not empty.
        block_bytes: of unpacked text; a longer plain text is cut as an unpacked file is.
        rows: what is read of a JSONL row; other files are plain text.
        shuffle: order of files, and of the documents of a page.

    Attributes:
        num_pages: files: what can be read alone.
        num_bytes: about what they unpack to.

    Raises:
        UserError: a file is not there.
    """

    def __init__(
        self, paths: Sequence[Path], block_bytes: int, rows: TextFormat, shuffle: Shuffle
    ) -> None:
        self._paths = list(paths)
        self._sizes = [files.file_size(path) for path in paths]
        self._block_bytes = block_bytes
        self._rows = rows
        self._shuffle = shuffle
        self._long_lines = LongLines()
        self._open: _Unpacked | None = None
        self.num_pages = len(self._paths)
        self.num_bytes = _UNPACKED_PER_PACKED * sum(self._sizes)

    @property
    def identity(self) -> dict[str, Any]:
        """Number, packed sizes and names of the files, and the size of a block."""
        return files.describe_files(self._paths, self._sizes, self._block_bytes)

    def page(self, epoch: int, cursor: Cursor) -> Page:
        """Unpack the blocks of a page.

        Raises:
            UserError: a file is gone, damaged or not UTF-8, or a row has no text.
        """
        file, number = cursor if len(cursor) == 2 else (cursor[0], 0)
        path = self._paths[self._shuffle.place(file, len(self._paths), epoch)]
        try:
            texts, is_last = self._read(path, number)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(
                f"{path} cannot be unpacked ({error}): it is damaged or cut short; "
                "replace or restore the file"
            ) from error
        following: Cursor | None = (file, number + 1)
        if is_last:
            self._open = None
            following = (file + 1, 0) if file + 1 < len(self._paths) else None
        return Page(self._shuffle.reorder(texts, epoch, file, number), following)

    def fraction(self, cursor: Cursor) -> float:
        """Return the part of the files before a cursor."""
        return cursor[0] / len(self._paths)

    def _read(self, path: Path, number: int) -> tuple[list[str], bool]:
        """Return the documents of a page, and whether the file ends with it."""
        page_bytes = files.PAGE_BLOCKS * self._block_bytes
        start, stop = number * page_bytes, (number + 1) * page_bytes
        form = files.format_of(path.with_suffix(""), self._rows)
        # A line begins behind a newline: a page looks one byte further back.
        unpacked = self._unpacked_from(path, max(0, start - 1))
        if form.is_jsonl:
            content = unpacked.ahead_to_line_end(stop)
        else:
            content = unpacked.ahead(stop + self._block_bytes)
        window = _Window(content, unpacked.position)
        end = unpacked.position + len(content)
        texts: list[str] = []
        for begin in range(start, min(stop, end), self._block_bytes):
            block = Block(path, begin, min(begin + self._block_bytes, end), self._block_bytes)
            texts += block_texts(window, block, form, self._long_lines)
        return texts, end <= stop

    def _unpacked_from(self, path: Path, position: int) -> "_Unpacked":
        is_behind = self._open is not None and self._open.position <= position
        if self._open is None or self._open.path != path or not is_behind:
            self._open = _Unpacked(path)
        self._open.skip_to(position)
        return self._open


class _Window(io.BytesIO):
    """Bytes of a file from `origin` on, found where they are in the file."""

    def __init__(self, content: bytes, origin: int) -> None:
        super().__init__(content)
        self._origin = origin

    def seek(self, position: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to a position of the file; only from its start."""
        assert whence == io.SEEK_SET
        return super().seek(position - self._origin) + self._origin


class _Unpacked:
    """A compressed file read forward, with what lies ahead at hand.

    Attributes:
        path: of the file.
        position: unpacked bytes passed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        self._stream = open_unpacked(path)
        self._ahead = bytearray()

    def skip_to(self, position: int) -> None:
        """Pass everything before a position, or the whole file."""
        while self.position < position and (self._ahead or self._more()):
            passed = min(len(self._ahead), position - self.position)
            del self._ahead[:passed]
            self.position += passed

    def ahead(self, stop: int) -> bytes:
        """Return what lies between here and a byte behind `stop`, or the file's end."""
        while self.position + len(self._ahead) <= stop and self._more():
            pass
        return bytes(self._ahead[: stop + 1 - self.position])

    def ahead_to_line_end(self, stop: int) -> bytes:
        """Return what `ahead` does, on to the end of the line that is under way at `stop`."""
        self.ahead(stop)
        searched = stop - 1 - self.position
        while (found := self._ahead.find(b"\n", searched)) < 0:
            searched = len(self._ahead)
            if not self._more():
                return bytes(self._ahead)
        return bytes(self._ahead[: max(found, stop - self.position) + 1])

    def _more(self) -> bool:
        piece = self._stream.read(_READ_BYTES)
        self._ahead += piece
        return len(piece) > 0


def open_unpacked(path: Path) -> UnpackedStream:
    """Open a compressed file to be read forward.

    Raises:
        UserError: it is zstd, which this build of pyarrow lacks.
    """
    if path.suffix.lower() == GZIP:
        return gzip.open(path, "rb")
    if not pyarrow.Codec.is_available("zstd"):
        raise UserError(
            f"{path} is packed with zstd, which the installed pyarrow cannot read: "
            "install pyarrow from PyPI, or pack the file with gzip"
        )
    return pyarrow.input_stream(str(path), compression="zstd")
