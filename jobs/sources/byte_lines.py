"""Lines of a file of text, plain or compressed, as bytes: cut at line feeds only, of bounded length."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa

from batchgen.errors import SourceError

MAX_LINE_BYTES = 256 * 1024 * 1024
_BUFFER_BYTES = 1024 * 1024
_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True, slots=True)
class Line:
    """One line without its line feed.

    Args:
        number: counted from 1, as an editor shows it.
        content: the bytes; empty when the line is longer than MAX_LINE_BYTES.
        is_too_long: whether it is.
    """

    number: int
    content: bytes
    is_too_long: bool = False


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """The file's bytes, decompressed, after a UTF-8 byte-order mark if there is one.

    Raises:
        SourceError: not readable, a damaged or cut compression, or UTF-16.
    """
    try:
        raw = pa.input_stream(str(path), compression=_COMPRESSIONS.get(path.suffix.lower()))
        with io.BufferedReader(cast(io.RawIOBase, raw), _BUFFER_BYTES) as file:
            head = file.peek(3)[:3]
            if head.startswith(_UTF16_BOMS):
                raise SourceError(f"{path} is UTF-16; convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)")
            if head == _UTF8_BOM:
                file.read(3)
            yield cast(BinaryIO, file)
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{path} cannot be read: {error}") from None


def read_lines(file: BinaryIO, max_bytes: int = MAX_LINE_BYTES) -> Iterator[Line]:
    """All lines, the last one with or without a line feed."""
    number = 0
    while content := file.readline(max_bytes + 1):
        number += 1
        if len(content) > max_bytes and not content.endswith(b"\n"):
            while (rest := file.readline(max_bytes)) and not rest.endswith(b"\n"):
                pass
            yield Line(number, b"", is_too_long=True)
        else:
            yield Line(number, content.removesuffix(b"\n"))
