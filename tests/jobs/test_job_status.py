"""What is seen of a job from outside, and how it is steered."""

import json
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.errors import ResumeError
from batchgen.jobs.control import send_command
from batchgen.jobs.lock import holder
from batchgen.jobs.spec import JobSpec
from batchgen.jobs.status import status
from batchgen.jobs.stopping import StopFlag
from batchgen.jobs.summary import JobSummary
from batchgen.jobs.testing import echo_job, eventually, go


def in_background(spec: JobSpec, stop: StopFlag) -> tuple[threading.Thread, list[JobSummary]]:
    done: list[JobSummary] = []
    thread = threading.Thread(target=lambda: done.append(go(spec, stop=stop)))
    thread.start()
    return thread, done


def test_status_while_the_first_run_loads_its_model(source: Path, tmp_path: Path) -> None:
    stop = StopFlag()
    thread, _ = in_background(echo_job(source, model="echo:?load_s=0.5"), stop)
    try:
        eventually(lambda: holder(tmp_path / "out" / ".batchgen" / "lock"))
        found = status(tmp_path / "out")
    finally:
        thread.join()
    assert (found.state, found.rows_done, found.lines()[-1]) == ("running", 0, "now: loading")


def test_a_running_job_is_watched_and_steered_from_outside(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    num_rows = 800
    pq.write_table(pa.table({"text": [f"row {i}" for i in range(num_rows)]}), source)
    spec = echo_job(
        source,
        model="echo:?delay_ms=5&batch=2",
        output__drain_timeout_s=0,
        output__commit_interval_s=0.05,
        output__shard_rows=100,
    )
    stop = StopFlag()
    thread, done = in_background(spec, stop)
    try:
        eventually(lambda: send_command(out, "ping"))
        eventually(lambda: status(out).rows_done > 0)
        assert status(out).state == "running"
        with pytest.raises(ResumeError, match="in use by process"):
            go(spec)
        send_command(out, "pause")
        eventually(lambda: status(out).latest.get("phase") == "paused")
        assert status(out).lines()[-1] == "now: paused"
        rows_done = eventually(lambda: status(out).latest["rows_done"])
        time.sleep(0.6)
        assert status(out).latest["rows_done"] <= rows_done + 2
        send_command(out, "set", max_num_seqs=16)
        send_command(out, "resume")
        eventually(lambda: status(out).latest.get("max_num_seqs") == 16)
        send_command(out, "stop")
        thread.join(30)
    finally:
        stop.request()
        thread.join()
    assert done[0].exit_code == 130 and done[0].rows_done < num_rows
    found = status(out)
    assert (found.state, found.rows_done, found.holder) == ("unfinished", done[0].rows_done, None)
    assert found.lines()[0].startswith("unfinished:") and json.dumps(found.to_mapping())
    assert go(echo_job(source)).rows_done == num_rows
    assert status(out).state == "finished"


def test_status_of_a_folder_without_a_job(tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match="holds no job"):
        status(tmp_path)
