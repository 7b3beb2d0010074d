"""The event log v1: JSON lines that the bar's successors, `watch` and the widgets read."""

import base64
import json
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from queue import Queue
from typing import Any, TextIO

SCHEMA = 1
_MAX_FILE_BYTES = 64 << 20
_KEPT_FILES = 8
# Events that may wait for the disk; more are dropped and counted, for a slow disk must not hold up the job.
_MAX_WAITING = 1024
_SUFFIX = ".jsonl"


class EventLog:
    """Writes events, by a thread of its own; a disk that fails costs events, never the job.

    Every line is an object with `v` (1), `t` (seconds since the epoch), `kind`, and what the kind has. A new
    run begins a new file, and so does every 64 MiB; the newest eight files are kept.

    Args:
        folder: exists.
    """

    def __init__(self, folder: Path, *, max_file_bytes: int = _MAX_FILE_BYTES):
        self._folder, self._max_file_bytes = folder, max_file_bytes
        self._number = max((int(path.stem) for path in event_files(folder)), default=0)
        self._queue: Queue[tuple[float, str, Mapping[str, Any]] | None] = Queue()
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._write_all, name="batchgen-events", daemon=True)
        self._thread.start()

    def put(self, kind: str, **values: Any) -> None:
        """Log an event; returns at once.

        Args:
            kind: what happened.
            **values: plain JSON types; bytes are compressed and written in base64.
        """
        if self._queue.qsize() >= _MAX_WAITING:
            self.num_dropped += 1
            return
        self._queue.put((time.time(), kind, values))

    def close(self) -> None:
        """Write what is waiting and end. May be called twice."""
        self._queue.put(None)
        self._thread.join()

    def _write_all(self) -> None:
        file: TextIO | None = None
        try:
            while (event := self._queue.get()) is not None:
                try:
                    if file is None or file.tell() >= self._max_file_bytes:
                        file = self._next_file(file)
                    file.write(_line(*event))
                    if self._queue.empty():
                        file.flush()
                except (OSError, ValueError):
                    self.num_dropped += 1
        finally:
            if file is not None:
                _close(file)

    def _next_file(self, file: TextIO | None) -> TextIO:
        if file is not None:
            _close(file)
        self._number += 1
        for path in event_files(self._folder)[: -_KEPT_FILES + 1]:
            path.unlink(missing_ok=True)
        return (self._folder / f"{self._number:06d}{_SUFFIX}").open("w", encoding="utf-8", newline="\n")


def event_files(folder: Path) -> list[Path]:
    """The files of an event log, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.glob(f"*{_SUFFIX}") if path.stem.isdigit()]
    return sorted(found, key=lambda path: int(path.stem))


def read_events(folder: Path) -> Iterator[dict[str, Any]]:
    """All events that are whole and of a schema that is known, oldest first.

    Lines that a killed run left half-written and files that are rotated away meanwhile are passed over.
    """
    for path in event_files(folder):
        yield from read_event_file(path)


def read_event_file(path: Path) -> Iterator[dict[str, Any]]:
    """The events of one file; see `read_events`."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    event = json.loads(line)
                except ValueError:
                    continue
                if isinstance(event, dict) and event.get("v") == SCHEMA and "kind" in event:
                    yield event
    except FileNotFoundError:
        return


def unpack_bytes(text: str) -> bytes:
    """The bytes that an event holds, such as a block map (one byte a block, see engine/messages.py)."""
    return zlib.decompress(base64.b64decode(text))


def _line(moment: float, kind: str, values: Mapping[str, Any]) -> str:
    packed = {
        name: base64.b64encode(zlib.compress(value, 1)).decode() if isinstance(value, bytes) else value
        for name, value in values.items()
    }
    return json.dumps({"v": SCHEMA, "t": round(moment, 3), "kind": kind} | packed, ensure_ascii=True) + "\n"


def _close(file: TextIO) -> None:
    try:
        file.close()
    except OSError:
        # What could not be flushed is lost; see EventLog.
        return
