"""Runs over a part of the input, and inputs whose length is not known."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchgen.jobs.engine_start as engine_start_module
from batchgen.engine.messages import EngineStats
from batchgen.jobs.events import EventLog
from batchgen.jobs.monitor import Monitor
from batchgen.jobs.row import RowPosition, SourceBatch
from batchgen.jobs.sources.file_source import FileSource
from batchgen.jobs.status import status
from batchgen.jobs.tally import Tally
from batchgen.jobs.testing import NUM_ROWS, QuietReporter, echo_job, go, read_shards, stopped_run
from batchgen.jobs.window import Window


def no_engine(*_: Any, **__: Any) -> Any:
    raise AssertionError("the engine was started")


def test_one_row_is_no_rows(source: Path, tmp_path: Path) -> None:
    assert "finished: 1 of 1 row done" in go(echo_job(source, limit=1)).lines()[0]
    assert "1 of 1 row committed (100%) in 1 shard and the journal" in status(tmp_path / "out").lines()[0]


def test_a_limit_is_raised_and_lifted(source: Path, tmp_path: Path) -> None:
    go(echo_job(source, "whole"))
    first = go(echo_job(source, limit=15))
    assert (first.rows_done, first.rows_total, first.exit_code) == (15, 15, 0)
    assert read_shards(tmp_path / "out").num_rows == 15
    assert go(echo_job(source, limit=15)).was_finished
    assert go(echo_job(source, limit=30)).rows_now == 15
    assert go(echo_job(source, limit=1000)).rows_done == NUM_ROWS
    assert go(echo_job(source)).was_finished
    assert read_shards(tmp_path / "out").equals(read_shards(tmp_path / "whole"))


@pytest.mark.parametrize("num_samples", [1, 2])
def test_a_limit_counts_the_rows_below_it_alone(source: Path, num_samples: int) -> None:
    # Rows 17 and 53 fail: in a sealed shard, and in the journal that a lower limit leaves open.
    texts = [f"row {i}" + " bad" * (i in (17, 53)) for i in range(NUM_ROWS)]
    pq.write_table(pa.table({"text": texts, "id": texts}), source)
    changes = {"model": "echo:?fail=bad", "sampling__n": num_samples}
    whole = go(echo_job(source, **changes))
    assert (whole.exit_code, whole.rows_failed, whole.rows_done) == (3, 2, NUM_ROWS)
    for limit, failed in ((10, 0), (17, 0), (18, 1), (53, 1), (54, 2)):
        found = go(echo_job(source, **changes, limit=limit))
        assert (found.exit_code, found.rows_failed) == (3 if failed else 0, failed)
        assert (found.rows_done, found.rows_total, found.rows_ok) == (limit, limit, limit - failed)
        assert sum(found.finish_reasons.values()) == limit * num_samples - failed * (num_samples - 1)


def test_a_limit_counts_the_journals_rows_below_it_alone(source: Path) -> None:
    spec = echo_job(source, model="echo:?fail=row 1", output__shard_rows=1000)
    kept = stopped_run(spec)
    assert kept.rows_failed and kept.rows_done > 1
    found = go(spec.with_overrides(["limit=1"]))
    assert (found.exit_code, found.rows_failed, found.rows_done) == (0, 0, 1)
    assert (found.failures, found.finish_reasons) == ({}, {"length": 1})


def test_a_source_that_does_not_know_its_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.jsonl"
    # Two whole shards: that they are all is only known once the file has been read.
    path.write_text("".join(json.dumps({"text": f"row {i}"}) + "\n\n" for i in range(20)))
    spec = echo_job(path)
    assert go(spec).rows_total == 20
    monkeypatch.setattr(engine_start_module, "start_engine", no_engine)
    assert go(spec).was_finished
    assert status(tmp_path / "out").state == "finished"
    (tmp_path / "out" / ".batchgen" / "source_rows.json").unlink()
    assert go(spec).rows_total == 20


@pytest.mark.parametrize(
    ("limit", "first", "last"), [(100, {None, 20}, 20), (7, {7}, 7), (None, {None, 20}, 20)]
)
def test_the_total_is_of_rows_that_were_seen(
    tmp_path: Path, limit: int | None, first: set[int | None], last: int
) -> None:
    lines = tmp_path / "in.jsonl"
    lines.write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(20)))
    reporter = QuietReporter()
    assert go(echo_job(lines, limit=limit), reporter=reporter).rows_total == last
    assert {state.rows_total for state in reporter.states} <= first | {last}
    assert (reporter.states[-1].rows_total, reporter.states[-1].rows_done) == (last, last)


def test_the_last_total_shown_is_known_where_reading_ends_after_the_last_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = tmp_path / "in.jsonl"
    lines.write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(20)))
    batches = FileSource.batches

    def late_end(self: FileSource, start: RowPosition) -> Iterator[SourceBatch]:
        yield from batches(self, start)
        time.sleep(0.5)

    monkeypatch.setattr(FileSource, "batches", late_end)
    reporter = QuietReporter()
    assert go(echo_job(lines), reporter=reporter).rows_total == 20
    assert (reporter.states[-1].rows_total, reporter.states[-1].rows_done) == (20, 20)


def test_rows_beyond_a_limit_that_is_reached_late_do_not_count(tmp_path: Path) -> None:
    tally = Tally(rows=30)
    reporter = QuietReporter()
    monitor = Monitor(EventLog(tmp_path / "events"), reporter, tally, rows_total=None, rows_before=30)
    tally.rows = 34  # 4 in this run; of the 30 before, 10 are beyond the limit
    monitor.know(25, 24)
    monitor.tick(lambda _: EngineStats(), Window(8), now=True)
    (state,) = reporter.states
    assert (state.rows_total, state.rows_done, state.rows_before) == (25, 24, 20)


def test_status_after_a_limit_that_says_less_than_what_is_done(source: Path, tmp_path: Path) -> None:
    lines = tmp_path / "in.jsonl"
    lines.write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(20)))
    go(echo_job(lines, limit=100))
    found = status(tmp_path / "out")
    assert (found.state, found.rows_done, found.rows_total) == ("finished", 20, 20)
    # A limit's run that only repaired, and one after it that found nothing to do.
    go(echo_job(source, "other"))
    (tmp_path / "other" / "data-00000.arrow").unlink()
    go(echo_job(source, "other", limit=30))
    go(echo_job(source, "other"))
    found = status(tmp_path / "other")
    assert (found.state, found.rows_done, found.rows_total) == ("finished", NUM_ROWS, NUM_ROWS)
