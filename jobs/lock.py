"""OutputLock: one run an output folder; a second one is told who has it."""

import fcntl
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from batchgen.errors import ResumeError, SinkError

# `holder` takes a shared lock for an instant; a run that meets it tries again instead of giving up.
_TRIES, _BETWEEN_TRIES_S = 10, 0.05


@dataclass(frozen=True, slots=True)
class Holder:
    """The run that has an output folder.

    Args:
        started: seconds since the epoch.
    """

    pid: int
    host: str
    started: float

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.started).astimezone().isoformat(" ", "seconds")
        return f"process {self.pid} on {self.host}, started {since}"

    @classmethod
    def read(cls, path: Path) -> "Holder | None":
        """The holder that a lock file names, or None when it names none."""
        try:
            data = json.loads(path.read_bytes())
            return cls(int(data["pid"]), str(data["host"]), float(data["started"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


class OutputLock:
    """The lock of an output folder, held until `release` or the end of this process, however it ends.

    The file stays; the system's lock on it is what counts, so that a dead run's lock is free at once. The
    descriptor is not inherited by programs that this process starts.

    Args:
        path: the lock file; its folder exists.

    Attributes:
        dead_holder: the run that had the lock before and ended without releasing it, or None.

    Raises:
        ResumeError: another run has it; says which.
        SinkError: the file cannot be written.
    """

    def __init__(self, path: Path):
        self._path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise SinkError(f"cannot write {path}: {error.strerror}") from error
        try:
            self._take()
            self.dead_holder = Holder.read(path)
            self._write(json.dumps(asdict(Holder(os.getpid(), socket.gethostname(), time.time()))).encode())
        except BaseException:
            os.close(self._file)
            raise

    def release(self) -> None:
        """Give the folder back. May be called twice."""
        if self._file >= 0:
            self._write(b"")
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> "OutputLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _take(self) -> None:
        for attempt in range(_TRIES):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if attempt < _TRIES - 1:
                    time.sleep(_BETWEEN_TRIES_S)
            except OSError as error:
                raise SinkError(f"cannot lock {self._path}: {error.strerror}") from error
        holder = Holder.read(self._path) or "another process"
        raise ResumeError(
            f"{self._path.parent.parent} is in use by {holder}: wait for it, stop it or choose another output"
        )

    def _write(self, content: bytes) -> None:
        try:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, content, 0)
        except OSError as error:
            raise SinkError(f"cannot write {self._path}: {error.strerror}") from error


def holder(path: Path) -> Holder | None:
    """The run that holds a lock file at this moment, or None."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return Holder.read(path)
    finally:
        os.close(file)
