"""Runs that end early and go on: the same bytes, what may change between runs, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchgen.jobs.engine_start as engine_start_module
from batchgen.errors import EngineError, ResumeError, SinkError
from batchgen.jobs.atomic import Disk
from batchgen.jobs.events import read_events
from batchgen.jobs.status import status
from batchgen.jobs.testing import (
    NUM_ROWS,
    DyingDisk,
    Killed,
    QuietReporter,
    echo_job,
    go,
    read_shards,
    stopped_run,
    visible,
)


def no_engine(*_: Any, **__: Any) -> Any:
    raise AssertionError("the engine was started")


def test_killed_before_a_write_and_resumed_gives_the_same_bytes(source: Path, tmp_path: Path) -> None:
    go(echo_job(source))
    expected = visible(tmp_path / "out")
    # Every boundary of the store is tried in test_store.py; here the way of a whole run, with a stride.
    num_killed = 0
    for dies_at in range(0, 70, 7):
        broken = echo_job(source, f"killed{dies_at}")
        try:
            # How many writes a run makes depends on its commits, and so on the clock.
            go(broken, disk=DyingDisk(dies_at))
        except Killed:
            num_killed += 1
        go(broken)
        assert visible(tmp_path / f"killed{dies_at}") == expected, dies_at
    assert num_killed > 5


@pytest.mark.parametrize("num_samples", [1, 2])
def test_stopped_and_resumed_gives_the_same_bytes(source: Path, tmp_path: Path, num_samples: int) -> None:
    # BG-31, with a failed row among the first and with n=2.
    changes = {"sampling__n": num_samples, "model__path": "echo:?jitter=40&fail=row 3"}
    go(echo_job(source, "whole", **changes))
    broken = echo_job(source, "broken", **changes)
    first = stopped_run(broken)
    assert first.exit_code == 130 and 0 < first.rows_done < NUM_ROWS
    assert "run the same command again" in first.lines()[-1]
    second = go(broken)
    assert second.rows_now == NUM_ROWS - first.rows_done
    assert visible(tmp_path / "broken") == visible(tmp_path / "whole")


def test_a_dead_engine_costs_no_finished_row(source: Path, tmp_path: Path) -> None:
    go(echo_job(source, "whole"))
    with pytest.raises(
        EngineError, match=r"die_after.*\n.*finished rows kept in .*broken.*again to go on"
    ) as died:
        go(echo_job(source, "broken", model="echo:?jitter=40&die_after=30", output__commit_interval_s=100.0))
    kept = status(tmp_path / "broken").rows_done
    assert kept >= 20 and f"{kept} finished rows" in str(died.value)
    assert go(echo_job(source, "broken")).rows_now == NUM_ROWS - kept
    assert visible(tmp_path / "broken") == visible(tmp_path / "whole")


def test_a_disk_that_fills_up_stops_the_job_and_keeps_the_rest(source: Path, tmp_path: Path) -> None:
    # BS-19
    class FullDisk(Disk):
        num_segments = 0

        def boundary(self, step: str, path: Path) -> None:
            self.num_segments += step == "rename" and path.suffix == ".segment"
            if step == "write" and self.num_segments:
                raise OSError(28, "No space left on device")

    with pytest.raises(SinkError, match=r"No space left on device.*run the same command again"):
        go(echo_job(source), disk=FullDisk())
    go(echo_job(source))
    go(echo_job(source, "whole"))
    assert visible(tmp_path / "out") == visible(tmp_path / "whole")


def test_a_finished_job_returns_without_an_engine(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(echo_job(source))
    before = visible(tmp_path / "out")
    monkeypatch.setattr(engine_start_module, "start_engine", no_engine)
    summary = go(echo_job(source))
    assert summary.was_finished and summary.exit_code == 0 and summary.rows_now == 0
    assert "57 of 57 rows done before" in summary.lines()[0]
    assert visible(tmp_path / "out") == before


def test_a_damaged_shard_of_a_finished_job_is_done_again(source: Path, tmp_path: Path) -> None:
    go(echo_job(source))
    expected = visible(tmp_path / "out")
    path = tmp_path / "out" / "data-00002.arrow"
    path.write_bytes(path.read_bytes()[:-100])
    reporter = QuietReporter()
    summary = go(echo_job(source), reporter=reporter)
    assert (summary.rows_now, summary.rows_done, summary.exit_code) == (10, NUM_ROWS, 0)
    assert any("data-00002.arrow is not what was written" in line for line in reporter.lines)
    assert visible(tmp_path / "out") == expected


CHANGED_JOBS = {
    "prompt.template": {"prompt": {"template": "Tell {{ text }}"}},
    "prompt.chat": {"prompt": {"template": "Say {{ text }}", "chat": True}},
    "prompt.system": {"prompt": {"template": "Say {{ text }}", "chat": True, "system": "Be kind"}},
    "prompt.truncate": {"prompt": {"template": "Say {{ text }}", "truncate": {"column": "text"}}},
    "sampling.temperature": {"sampling__temperature": 0.5},
    "sampling.max_tokens": {"sampling__max_tokens": 501},
    "sampling.stop": {"sampling__stop": ["x"]},
    "sampling.seed": {"sampling__seed": 1},
    "model": {"model__path": "echo:?fail=row 7"},
    "model.revision": {"model__revision": "v2"},
    "engine.max_model_len": {"engine": {"max_model_len": 512}},
    "engine.dtype": {"engine": {"dtype": "bfloat16"}},
    "output.prefix": {"output__prefix": "gen_"},
}


@pytest.mark.parametrize("key", CHANGED_JOBS)
def test_a_changed_job_is_refused_by_the_names_of_what_differs(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    # BG-33
    stopped_run(echo_job(source))
    before = visible(tmp_path / "out")
    monkeypatch.setattr(engine_start_module, "start_engine", no_engine)
    with pytest.raises(ResumeError) as refused:
        go(echo_job(source, **CHANGED_JOBS[key]))
    if key == "model":
        assert "model: echo:?jitter=40&batch=8&delay_ms=2 → echo:?fail=row 7" in str(refused.value)
    else:
        assert key in str(refused.value) and "in the first run" in str(refused.value)
    assert "--restart" in str(refused.value)
    assert visible(tmp_path / "out") == before


def test_a_changed_input_file_is_refused_by_its_name(source: Path) -> None:
    stopped_run(echo_job(source))
    texts = [f"other {i}" for i in range(NUM_ROWS)]
    pq.write_table(pa.table({"text": texts, "id": texts}), source)
    with pytest.raises(ResumeError, match=r"(?s)in\.parquet has changed.*start over with --restart"):
        go(echo_job(source))


def test_sizes_and_spellings_may_change(source: Path, tmp_path: Path) -> None:
    # BG-33, second group.
    go(echo_job(source, "whole"))
    stopped_run(echo_job(source))
    changed = echo_job(
        source,
        "../" + tmp_path.name + "/out",
        model="echo:?batch=3",
        engine={"max_num_seqs": 5, "max_num_batched_tokens": 64, "num_threads": 1},
        output__shard_rows=7,
        output__drain_timeout_s=1,
    )
    reporter = QuietReporter()
    assert go(changed, reporter=reporter).exit_code == 0
    assert "output.shard_rows stays 10, as in the first run" in reporter.lines
    assert visible(tmp_path / "out") == visible(tmp_path / "whole")


def test_what_the_first_run_decided_holds_for_the_next(source: Path, tmp_path: Path) -> None:
    stopped_run(echo_job(source, engine={"max_model_len": 1000}))
    go(echo_job(source))
    stored = json.loads((tmp_path / "out" / ".batchgen" / "manifest.json").read_text())
    assert stored["engine"]["max_model_len"] == 1000
    last = [
        event for event in read_events(tmp_path / "out" / ".batchgen" / "events") if event["kind"] == "engine"
    ]
    assert [event["max_model_len"] for event in last] == [1000, 1000]


def test_another_kind_of_machine_is_said(source: Path, tmp_path: Path) -> None:
    stopped_run(echo_job(source))
    manifest = tmp_path / "out" / ".batchgen" / "manifest.json"
    stored = json.loads(manifest.read_text())
    stored["environment"]["backend"] = "abacus"
    manifest.write_text(json.dumps(stored))
    reporter = QuietReporter()
    go(echo_job(source), reporter=reporter)
    assert any("backend abacus → echo" in line and "rows may differ" in line for line in reporter.lines)


def test_restart_removes_what_is_ours_and_nothing_else(source: Path, tmp_path: Path) -> None:
    go(echo_job(source))
    out = tmp_path / "out"
    (out / "notes.txt").write_text("mine")
    changed = echo_job(source, prompt={"template": "Tell {{ text }}"}, limit=5)
    assert go(changed, restart=True).rows_done == 5
    assert read_shards(out).column("generated_text")[1].as_py().startswith("Tell row 1|")
    assert read_shards(out).num_rows == 5 and (out / "notes.txt").read_text() == "mine"
    # With nothing there, it is a first run.
    assert go(echo_job(source, "new"), restart=True).rows_done == NUM_ROWS


def test_files_of_somebody_else_are_not_written_over(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "state.json").write_text("{}")
    for restart in (False, True):
        with pytest.raises(ResumeError, match=r"state\.json but no manifest\.json of a job that wrote it"):
            go(echo_job(source), restart=restart)
    assert visible(tmp_path / "out") == {"state.json": b"{}"}


def test_rows_without_a_manifest_are_not_taken_for_those_of_this_job(source: Path, tmp_path: Path) -> None:
    stopped_run(echo_job(source))
    (tmp_path / "out" / ".batchgen" / "manifest.json").unlink()
    for path in (tmp_path / "out").iterdir():
        if path.is_file():
            path.unlink()
    with pytest.raises(ResumeError, match=r"\.segment but no manifest"):
        go(echo_job(source, prompt={"template": "another {{ text }}"}))


@pytest.mark.parametrize("content", ["[]", "null", "7", '{"format": 1}', "{", ""])
def test_a_manifest_that_is_none_is_named(source: Path, tmp_path: Path, content: str) -> None:
    go(echo_job(source))
    (tmp_path / "out" / ".batchgen" / "manifest.json").write_text(content)
    with pytest.raises(ResumeError, match=r"manifest\.json cannot be read .* start over with --restart"):
        go(echo_job(source))
    assert go(echo_job(source), restart=True).rows_now == NUM_ROWS
