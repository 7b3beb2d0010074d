"""What tells one input file from another: its content, never its time or its place."""

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchgen.errors import ResumeError, SourceError

# A file up to this size is hashed whole; of a larger one the head, the tail and pieces between them.
WHOLE_BYTES = 256 * 1024 * 1024
PIECE_BYTES = 1024 * 1024
NUM_PIECES = 64
_READ_BYTES = 1024 * 1024
_HASH_THREADS = 4


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One input file.

    Args:
        name: path relative to the folder that all input files have in common, with "/".
        path: where it is now.
        size: in bytes.
        content_hash: see `hash_content`.
    """

    name: str
    path: Path
    size: int
    content_hash: str

    def to_mapping(self) -> dict[str, Any]:
        """What is stored of it; where it lies is not."""
        return {"name": self.name, "size": self.size, "hash": self.content_hash}


def hash_content(
    path: Path,
    *,
    whole_bytes: int = WHOLE_BYTES,
    piece_bytes: int = PIECE_BYTES,
    num_pieces: int = NUM_PIECES,
) -> str:
    """The hash of a file's content: "sha256:..." of all of it, or "sha256-pieces:..." of a large file.

    The pieces of a large file are its head, its tail, and `num_pieces` spaced evenly between them, each of
    `piece_bytes`.
    """
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        if size <= whole_bytes:
            while block := file.read(_READ_BYTES):
                digest.update(block)
            return f"sha256:{digest.hexdigest()}"
        last = size - piece_bytes
        digest.update(size.to_bytes(8, "little"))
        for piece in range(num_pieces + 2):
            file.seek(last * piece // (num_pieces + 1))
            digest.update(file.read(piece_bytes))
    return f"sha256-pieces:{digest.hexdigest()}"


def identify(paths: Sequence[Path], root: Path) -> tuple[SourceFile, ...]:
    """Each file with its size and content hash, named relative to `root`.

    Raises:
        SourceError: a file cannot be read.
    """

    def look(path: Path) -> SourceFile:
        try:
            return SourceFile(
                path.relative_to(root).as_posix(), path, path.stat().st_size, hash_content(path)
            )
        except OSError as error:
            raise SourceError(f"input file {path} cannot be read: {error.strerror}") from None

    with ThreadPoolExecutor(min(_HASH_THREADS, len(paths))) as pool:
        return tuple(pool.map(look, paths))


def schema_identity(schema: pa.Schema, rename: Mapping[str, str]) -> dict[str, Any]:
    """What is stored of a schema: readable for a person, and exact."""
    return {
        "columns": {field.name: str(field.type) for field in schema},
        "rename": dict(rename),
        "schema": base64.b64encode(schema.serialize().to_pybytes()).decode(),
    }


def verify_identity(stored: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Check a source's identity against that of the first run.

    Raises:
        ResumeError: names the file, or the part, that differs.
    """
    verify_files(stored.get("files", ()), current.get("files", ()))
    for key in sorted(stored.keys() | current.keys()):
        if stored.get(key) != current.get(key):
            raise ResumeError(
                f"the input has changed since the first run: {key} was {stored.get(key)!r}, "
                f"now {current.get(key)!r}"
            )


def verify_files(stored: Iterable[dict[str, Any]], current: Iterable[dict[str, Any]]) -> None:
    """Check that the files of a first run are still there, unchanged and in the same order.

    Raises:
        ResumeError: naming the first file that is missing, changed, new, or elsewhere in the order.
    """
    old, new = list(stored), list(current)
    present = {file["name"]: file for file in new}
    known = {file["name"] for file in old}
    for file in old:
        found = present.get(file["name"])
        if found is None:
            raise ResumeError(f"input file {file['name']} of the first run is missing")
        if found["size"] != file["size"]:
            raise ResumeError(
                f"input file {file['name']} has changed since the first run: {file['size']} bytes then, "
                f"{found['size']} now"
            )
        if found["hash"] != file["hash"]:
            raise ResumeError(f"input file {file['name']} has changed since the first run: other content")
    for file in new:
        if file["name"] not in known:
            raise ResumeError(f"input file {file['name']} was not there at the first run")
    if [file["name"] for file in old] != [file["name"] for file in new]:
        raise ResumeError("the input files come in another order than at the first run")
