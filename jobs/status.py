"""JobStatus: how far a job is, read from its output folder alone, whether or not a process runs it."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from batchgen.errors import ResumeError
from batchgen.jobs.atomic import Disk
from batchgen.jobs.columns import OutputColumns
from batchgen.jobs.events import event_files, read_event_file
from batchgen.jobs.journal import Journal, SegmentReader
from batchgen.jobs.layout import OutputFolder
from batchgen.jobs.lock import Holder, holder
from batchgen.jobs.manifest import Manifest
from batchgen.jobs.output_state import read_source_rows
from batchgen.jobs.progress import ProgressState
from batchgen.jobs.shards import ShardFolder
from batchgen.jobs.tally import Tally
from batchgen.quantities import counted

# A running job removes segments while they are read; then reading begins again.
_TRIES = 10
_LOADING = {"phase": "loading"}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """A job as its output folder shows it.

    Args:
        state: "running", "unfinished" (run the command again) or "finished".
        rows_total: rows of the last run's job, its limit applied; None while that is not known.
        rows_done: rows committed to disk, failed ones included.
        shards: final files.
        latest: the newest `interval` event of the last run; before the first one only its `phase`, "loading".
    """

    output: Path
    state: str
    rows_total: int | None
    rows_done: int
    rows_failed: int
    shards: int
    failures: dict[str, int] = field(default_factory=dict)
    finish_reasons: dict[str, int] = field(default_factory=dict)
    input_tokens: int = 0
    generated_tokens: int = 0
    holder: Holder | None = None
    latest: dict[str, Any] = field(default_factory=dict)

    def to_mapping(self) -> dict[str, Any]:
        """As plain JSON types."""
        return asdict(self) | {"output": str(self.output)}

    def lines(self) -> list[str]:
        """The same in words."""
        rows = counted(self.rows_done, "row")
        if self.rows_total is not None:
            rows = f"{self.rows_done:,} of {counted(self.rows_total, 'row')}"
        share = f" ({self.rows_done / self.rows_total:.0%})" if self.rows_total else ""
        where = f"{counted(self.shards, 'shard')} and the journal"
        lines = [f"{self.state}: {rows} committed{share} in {where}"]
        if self.rows_failed:
            codes = ", ".join(f"{code} {count:,}" for code, count in sorted(self.failures.items()))
            lines.append(f"failed: {counted(self.rows_failed, 'row')} ({codes})")
        lines.append(f"tokens: {self.input_tokens:,} in, {self.generated_tokens:,} generated")
        if self.holder is not None:
            lines.append(f"run by {self.holder}")
            phase = self.latest.get("phase", "running")
            if phase != "running":
                return [*lines, f"now: {phase}"]
            if self.latest:
                now = ProgressState.from_mapping(self.latest)
                lines.append(f"now: {now.words()}, {now.num_running} running")
        return lines


def status(output: Path | str) -> JobStatus:
    """Look at an output folder; changes nothing there. Shards are not read: a damaged one is found by `run`.

    Raises:
        ResumeError: no job has written there.
    """
    folder = OutputFolder(Path(output))
    manifest = Manifest.read(folder)
    held_by = holder(folder.lock)
    if manifest is None and held_by is not None:
        # A first run whose model loads.
        return JobStatus(
            output=folder.root,
            state="running",
            rows_total=None,
            rows_done=0,
            rows_failed=0,
            shards=0,
            holder=held_by,
            latest=_LOADING,
        )
    if manifest is None:
        raise ResumeError(f"{output} holds no job of batchgen (no {folder.manifest})")
    for attempt in range(_TRIES):
        try:
            tally, num_shards = _count(folder, manifest)
            break
        except FileNotFoundError:
            if attempt == _TRIES - 1:
                raise
    rows_total, latest = _from_events(folder)
    known = read_source_rows(folder) if manifest.num_rows is None else manifest.num_rows
    # A limit counts for no more than the source has, and not at all once more rows than that are done.
    if rows_total is None or tally.rows > rows_total:
        rows_total = known
    elif known is not None:
        rows_total = min(rows_total, known)
    is_whole = rows_total is not None and tally.rows >= rows_total
    return JobStatus(
        output=folder.root,
        state="running" if held_by is not None else "finished" if is_whole else "unfinished",
        rows_total=rows_total,
        rows_done=tally.rows,
        rows_failed=tally.rows_failed,
        shards=num_shards,
        failures=dict(tally.failures),
        finish_reasons=dict(tally.finish_reasons),
        input_tokens=tally.input_tokens,
        generated_tokens=tally.generated_tokens,
        holder=held_by,
        latest=latest,
    )


def _count(folder: OutputFolder, manifest: Manifest) -> tuple[Tally, int]:
    """Counts over sealed shards and over the rows that only the journal has."""
    columns = OutputColumns(
        pa.schema([]),
        (),
        num_samples=manifest.fingerprint["sampling.n"],
        prefix=manifest.fingerprint["output.prefix"],
    )
    # The journal first: what is sealed meanwhile is in both, and is taken out of the journal's rows.
    segments = list(_segments(Journal(folder, Disk(), columns.row_index), columns))
    sealed = ShardFolder(folder, Disk(), columns).find(by_content=False).sealed
    tally = Tally()
    for sidecar in sealed.values():
        tally.add(sidecar.tally)
    seen = np.array([], np.int64)
    for table, rows in segments:
        is_new = ~np.isin(rows, seen)
        for sidecar in sealed.values():
            is_new &= (rows < sidecar.range.first_row) | (rows >= sidecar.range.stop_row)
        for batch in table.filter(is_new).to_batches():
            tally.count_batch(batch, columns)
        seen = np.concatenate((seen, rows[is_new]))
    return tally, len(sealed)


def _segments(journal: Journal, columns: OutputColumns) -> Iterator[tuple[pa.Table, Any]]:
    """The columns that are counted, and the row numbers, of every good segment."""
    for segment in journal.load()[0]:
        reader = SegmentReader(segment, columns.row_index)
        yield reader.table.select(columns.counted), reader.indices


def _from_events(folder: OutputFolder) -> tuple[int | None, dict[str, Any]]:
    """Rows of the last run's job, and its newest numbers."""
    rows_total: int | None = None
    latest: dict[str, Any] = {}
    for path in event_files(folder.events)[-1:]:
        for event in read_event_file(path):
            if event["kind"] in ("run", "interval"):
                rows_total = event.get("rows_total") if event.get("rows_total") is not None else rows_total
            if event["kind"] == "interval":
                latest = event
            elif event["kind"] == "run":
                latest = _LOADING
    return rows_total, latest
