"""Disk: the only hand that changes files of an output folder; every change is whole or did not happen."""

import hashlib
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from batchgen.errors import SinkError

_BUFFER_BYTES = 1 << 20


class NewFile:
    """A file being written: what went into it so far.

    Attributes:
        stream: binary, buffered; write to it.
        num_bytes, sha256: of the whole content, valid once `Disk.create` has closed it.
    """

    def __init__(self, disk: "Disk", path: Path):
        self._raw = _HashedFile(disk, path)
        self.stream = cast(BinaryIO, io.BufferedWriter(self._raw, _BUFFER_BYTES))
        self.num_bytes = 0
        self.sha256 = ""

    def finish(self) -> None:
        """Bring everything to the disk."""
        self.stream.flush()
        self.num_bytes, self.sha256 = self._raw.num_bytes, self._raw.digest.hexdigest()
        self._raw.sync()


class _HashedFile(io.RawIOBase):
    def __init__(self, disk: "Disk", path: Path):
        self._disk, self._path = disk, path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self.digest = hashlib.sha256()
        self.num_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._disk.boundary("write", self._path)
        written = os.write(self._file, data)
        self.digest.update(memoryview(data)[:written])
        self.num_bytes += written
        return written

    def sync(self) -> None:
        self._disk.boundary("fsync", self._path)
        self._disk.fsync(self._file)

    def close(self) -> None:
        if not self.closed:
            os.close(self._file)
        super().close()


class Disk:
    """Files under an output folder: written beside, synced, renamed, the folder synced.

    Every step passes through `boundary`, so that a test can end the process before any of them.

    Raises:
        SinkError: from every method, when the system refuses; names the path and says what to do.
    """

    def boundary(self, step: str, path: Path) -> None:
        """Called before every change: "create", "write", "fsync", "rename", "remove" or "sync_folder"."""

    def fsync(self, descriptor: int) -> None:
        """Bring an open file or folder to the disk."""
        os.fsync(descriptor)

    def make_folder(self, path: Path) -> None:
        """Make a folder and its parents, if they are not there."""
        with _explained("make the folder", path):
            path.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def create(self, path: Path) -> Iterator[NewFile]:
        """A new file under a temporary name. On leaving without an error its content is on the disk."""
        with _explained("write", path) as told:
            self.boundary("create", path)
            file = NewFile(self, path)
            try:
                yield file
                told.num_bytes = file._raw.num_bytes
                file.finish()
            finally:
                told.num_bytes = file._raw.num_bytes
                file._raw.close()

    def publish(self, temporary: Path, final: Path) -> None:
        """Give a finished file its final name, for good."""
        with _explained("rename to", final):
            self.boundary("rename", final)
            os.replace(temporary, final)
            self.sync_folder(final.parent)

    def sync_folder(self, path: Path) -> None:
        """Bring a folder's names to the disk."""
        with _explained("sync the folder", path):
            self.boundary("sync_folder", path)
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self.fsync(folder)
            finally:
                os.close(folder)

    def write_json(self, path: Path, value: Any, scratch: Path) -> None:
        """Replace a small file by this value, at once; keys sorted.

        Args:
            path: the file.
            value: plain JSON types.
            scratch: a folder on the same file system for the temporary name.
        """
        temporary = scratch / f"{path.name}.tmp"
        with self.create(temporary) as file:
            file.stream.write(
                json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"
            )
        self.publish(temporary, path)

    def remove(self, path: Path) -> None:
        """Remove a file if it is there."""
        with _explained("remove", path):
            self.boundary("remove", path)
            path.unlink(missing_ok=True)


class _Told:
    num_bytes: int | None = None


@contextmanager
def _explained(what: str, path: Path) -> Iterator[_Told]:
    told = _Told()
    try:
        yield told
    except OSError as error:
        size = "" if told.num_bytes is None else f" after {told.num_bytes} bytes"
        raise SinkError(
            f"cannot {what} {path}{size}: {error.strerror or error}; everything committed before is kept: "
            f"repair this (free space, permissions) and run the same command again"
        ) from error


def sha256_of(path: Path) -> str:
    """The sha256 of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
