"""What tests of whole jobs need: a small job, a quiet reporter, disks that fail, what an output holds."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.errors import BatchgenError
from batchgen.jobs.atomic import Disk
from batchgen.jobs.progress import ProgressState
from batchgen.jobs.runner import run
from batchgen.jobs.spec import JobSpec
from batchgen.jobs.stopping import StopFlag
from batchgen.jobs.summary import JobSummary

# Rows of `write_source`.
NUM_ROWS = 57


class Killed(BaseException):
    """The process is gone."""


class DyingDisk(Disk):
    """Ends the process before the k-th change; from then on nothing more happens.

    Args:
        dies_at: how many changes happen; None: all.
    """

    def __init__(self, dies_at: int | None = None):
        self.num_steps, self.dies_at = 0, dies_at

    def boundary(self, step: str, path: Path) -> None:
        """Count a change, or be killed before it."""
        if self.dies_at is not None and self.num_steps >= self.dies_at:
            raise Killed(step, path)
        self.num_steps += 1

    def fsync(self, descriptor: int) -> None:
        """A process that is killed loses nothing that it wrote; this makes tests quick."""


class StoppingDisk(Disk):
    """Asks a run to stop once a segment is on the disk."""

    def __init__(self, stop: StopFlag):
        self._stop = stop

    def boundary(self, step: str, path: Path) -> None:
        """Look whether a segment has got its name."""
        if step == "rename" and path.suffix == ".segment":
            self._stop.request()


class QuietReporter:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.states: list[ProgressState] = []

    def say(self, line: str) -> None:
        """Keep a line."""
        self.lines.append(line)

    def show(self, state: ProgressState) -> None:
        """Keep a state."""
        self.states.append(state)

    def close(self) -> None:
        """Keep that it was closed."""
        self.lines.append("closed")


def write_source(folder: Path) -> Path:
    """A Parquet file with columns `text` and `id`; equal ids occur."""
    # One row far longer than the rest comes first, so that rows finish out of order.
    texts = ["the first row is long " * 30, *(f"row {i}" for i in range(1, NUM_ROWS))]
    path = folder / "in.parquet"
    pq.write_table(pa.table({"text": texts, "id": [f"id{i % 5}" for i in range(NUM_ROWS)]}), path)
    return path


def echo_job(source: Path, output: str = "out", **changes: Any) -> JobSpec:
    """A job of the echo engine over a file with a column `text`.

    Args:
        source: the file.
        output: folder, beside the file.
        changes: whole sections, or single settings as section__key.
    """
    data: dict[str, Any] = {
        "model": {"path": "echo:?jitter=40&batch=8"},
        "input": {"path": str(source)},
        "prompt": {"template": "Say {{ text }}"},
        "sampling": {"max_tokens": 500},
        "output": {"path": output, "shard_rows": 10, "commit_interval_s": 0.002},
    }
    for name, value in changes.items():
        section, _, key = name.partition("__")
        if key:
            data.setdefault(section, {})[key] = value
        else:
            data[section] = value
    return JobSpec.from_mapping(data, source.parent)


def go(spec: JobSpec, **options: Any) -> JobSummary:
    """Run a job without a word, unless a reporter is given; `options` are those of `run`."""
    return run(spec, **({"reporter": QuietReporter()} | options))


def stopped_run(spec: JobSpec) -> JobSummary:
    """Stop after the first commit, long before the end; what is in flight is dropped."""
    stop = StopFlag()
    slow = [f"model.path={spec.model.path}&delay_ms=2", "output.drain_timeout_s=0"]
    return go(spec.with_overrides(slow), stop=stop, disk=StoppingDisk(stop))


def visible(folder: Path) -> dict[str, bytes]:
    """What a user finds in an output folder: name of each file -> content."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def read_shards(folder: Path) -> pa.Table:
    """All rows of an output folder."""
    parts = [pa.ipc.open_stream(path.read_bytes()).read_all() for path in sorted(folder.glob("data-*.arrow"))]
    return pa.concat_tables(parts)


def eventually(what: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """What `what` gives as soon as it is true; what it raises meanwhile counts as not yet.

    Raises:
        AssertionError: it did not come true in time.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if found := what():
                return found
        except (BatchgenError, OSError):
            pass
        time.sleep(0.005)
    raise AssertionError("it did not happen")
