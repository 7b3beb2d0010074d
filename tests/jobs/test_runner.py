"""Whole runs with the echo engine: results, resume, refusals, failures, limits, deaths at every write."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchgen.jobs.engine_start as engine_start_module
from batchgen.engine.child_client import ChildClient
from batchgen.errors import BatchgenError, ConfigError, EngineError, ResumeError, SinkError, SourceError
from batchgen.jobs.atomic import Disk
from batchgen.jobs.control import send_command
from batchgen.jobs.events import read_events
from batchgen.jobs.layout import OutputFolder
from batchgen.jobs.lock import holder
from batchgen.jobs.progress import ProgressState
from batchgen.jobs.runner import run
from batchgen.jobs.spec import JobSpec, load_spec
from batchgen.jobs.status import status
from batchgen.jobs.stopping import StopFlag
from batchgen.jobs.summary import JobSummary

NUM_ROWS = 57


class Killed(BaseException):
    """The process is gone."""


class DyingDisk(Disk):
    """Ends the process before the k-th change; from then on nothing more happens."""

    def __init__(self, dies_at: int | None = None):
        self.num_steps, self.dies_at = 0, dies_at

    def boundary(self, step: str, path: Path) -> None:
        if self.dies_at is not None and self.num_steps >= self.dies_at:
            raise Killed(step, path)
        self.num_steps += 1


class Silent:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.states: list[ProgressState] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def show(self, state: ProgressState) -> None:
        self.states.append(state)

    def close(self) -> None:
        self.lines.append("closed")


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    # One row far longer than the rest comes first, so that rows finish out of order.
    texts = ["the first row is long " * 30, *(f"row {i}" for i in range(1, NUM_ROWS))]
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"text": texts, "id": [f"id{i % 5}" for i in range(NUM_ROWS)]}), path)
    return path


def job(source: Path, output: str = "out", **changes: Any) -> JobSpec:
    """The job of these tests; `changes` are "section__key" settings."""
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
    return run(spec, **({"reporter": Silent()} | options))


def visible(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(root.iterdir()) if path.is_file()}


def table(root: Path) -> pa.Table:
    parts = [pa.ipc.open_stream(path.read_bytes()).read_all() for path in sorted(root.glob("data-*.arrow"))]
    return pa.concat_tables(parts)


def no_engine(*_: Any, **__: Any) -> Any:
    raise AssertionError("the engine was started")


class StoppingDisk(Disk):
    """Asks the run to stop once a segment is on the disk."""

    def __init__(self, stop: StopFlag):
        self._stop = stop

    def boundary(self, step: str, path: Path) -> None:
        if step == "rename" and path.suffix == ".segment":
            self._stop.request()


def stopped_run(spec: JobSpec) -> JobSummary:
    """Stop after the first commit, long before the end; what is in flight is dropped."""
    stop = StopFlag()
    slow = [f"model.path={spec.model.path}&delay_ms=2", "output.drain_timeout_s=0"]
    return go(spec.with_overrides(slow), stop=stop, disk=StoppingDisk(stop))


def test_every_row_comes_out_once_in_order_with_its_own_answer(source: Path, tmp_path: Path) -> None:
    # BG-35: equal ids are data; a row's own place is its key.
    reporter = Silent()
    summary = go(job(source), reporter=reporter)
    written = table(tmp_path / "out")
    assert written.column("row_index").to_pylist() == list(range(NUM_ROWS))
    texts = pq.read_table(source).column("text").to_pylist()
    for text, answer in zip(texts, written.column("generated_text").to_pylist(), strict=True):
        assert answer.startswith(f"Say {text}|"[:500])
    assert written.column("id").to_pylist() == [f"id{i % 5}" for i in range(NUM_ROWS)]
    assert written.column("num_input_tokens").to_pylist() == [len(f"Say {text}") + 1 for text in texts]
    assert (summary.exit_code, summary.rows_done, summary.rows_total, summary.rows_ok) == (0, 57, 57, 57)
    assert summary.generated_tokens == sum(written.column("num_generated_tokens").to_pylist())
    assert reporter.lines[-1] == "closed" and reporter.states[-1].rows_done == NUM_ROWS
    assert "sampling.max_tokens=500 (job)" in reporter.lines
    kinds = {event["kind"] for event in read_events(OutputFolder(tmp_path / "out").events)}
    assert kinds >= {"run", "engine", "interval", "block_map", "end"}


def test_a_finished_job_returns_without_an_engine(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(job(source))
    before = visible(tmp_path / "out")
    monkeypatch.setattr(engine_start_module, "start_engine", no_engine)
    summary = go(job(source))
    assert summary.was_finished and summary.exit_code == 0 and summary.rows_now == 0
    assert "57 of 57 rows done before" in summary.lines()[0]
    assert visible(tmp_path / "out") == before


def test_failed_rows_are_rows_of_the_output(source: Path, tmp_path: Path) -> None:
    spec = job(source, model="echo:?fail=row 7")
    summary = go(spec)
    written = table(tmp_path / "out").to_pylist()
    failed = [row["row_index"] for row in written if row["error"] is not None]
    assert failed == [7] and written[7]["finish_reason"] == "error" and written[7]["generated_text"] is None
    assert summary.exit_code == 3 and summary.failures == {"engine_error": 1}
    assert "1 row failed (engine_error 1)" in summary.lines()[1]
    # Failed rows are done: they are not run again by themselves.
    again = go(spec)
    assert again.was_finished and again.exit_code == 3 and again.failures == {"engine_error": 1}


def test_a_failed_row_of_several_samples_has_a_reason_for_each(source: Path, tmp_path: Path) -> None:
    spec = job(source, sampling={"n": 2, "max_tokens": 500}, prompt={"template": "{{ text }}"})
    summary = go(spec.with_overrides(["engine.max_model_len=100", "limit=3"]))
    first = table(tmp_path / "out").to_pylist()[0]
    assert first["error"]["code"] == "prompt_too_long"
    assert first["finish_reason"] == ["error", "error"]
    assert first["generated_text"] is None and first["num_generated_tokens"] is None
    assert summary.finish_reasons["error"] == 1 == status(tmp_path / "out").finish_reasons["error"]


def test_the_share_of_cut_texts_is_that_of_good_rows(tmp_path: Path) -> None:
    counts = {"rows_total": 100, "rows_done": 100, "rows_failed": 90, "rows_now": 100}
    reasons = {"error": 90, "length": 5, "stop": 5}
    (line,) = [
        line
        for line in JobSummary(output=tmp_path, **counts, finish_reasons=reasons).lines()
        if "cut off" in line
    ]
    assert "50% of the texts" in line and "engine.max_model_len where the context is full" in line


def test_one_row_is_no_rows(source: Path, tmp_path: Path) -> None:
    assert "finished: 1 of 1 row done" in go(job(source, limit=1)).lines()[0]
    assert "1 of 1 row committed (100%) in 1 shard and the journal" in status(tmp_path / "out").lines()[0]


def test_the_start_says_the_jobs_seed(source: Path) -> None:
    reporter = Silent()
    go(job(source, sampling={"seed": 7, "max_tokens": 5}), reporter=reporter)
    assert "sampling.seed=7 (job)" in reporter.lines


def test_a_stop_ends_soon_however_long_a_step_takes(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(config: Any, tokenizer: Any) -> ChildClient:
        return ChildClient(config, tokenizer, executor="batchgen.counting:load_stuck")

    monkeypatch.setattr(engine_start_module, "start_engine", stuck)
    spec = job(source, output__drain_timeout_s=1, prompt={"template": "A", "add_special_tokens": False})
    stop, reporter = StopFlag(), Silent()
    thread = threading.Thread(target=lambda: go(spec, stop=stop, reporter=reporter))
    thread.start()
    try:
        eventually(lambda: len(reporter.states) > 6)
        time.sleep(1.2)  # a block map was asked for and cannot be had
        asked = time.monotonic()
        stop.request()
        eventually(lambda: reporter.lines[-1].startswith("stopping: up to 1 s for the rows in flight"))
        assert time.monotonic() - asked < 0.8
        thread.join(10)
        assert not thread.is_alive() and time.monotonic() - asked < 5
    finally:
        stop.request()
        thread.join(20)


def test_cut_texts_are_warned_of(source: Path) -> None:
    # BS-13
    assert any("cut off" in line for line in go(job(source, "a", sampling={"max_tokens": 5})).lines())
    assert not any("cut off" in line for line in go(job(source, "b")).lines())


def test_killed_before_a_write_and_resumed_gives_the_same_bytes(source: Path, tmp_path: Path) -> None:
    go(job(source))
    expected = visible(tmp_path / "out")
    # Every boundary of the store is tried in test_store.py; here the way of a whole run, with a stride.
    num_killed = 0
    for dies_at in range(0, 70, 7):
        broken = job(source, f"killed{dies_at}")
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
    go(job(source, "whole", **changes))
    broken = job(source, "broken", **changes)
    first = stopped_run(broken)
    assert first.exit_code == 130 and 0 < first.rows_done < NUM_ROWS
    assert "run the same command again" in first.lines()[-1]
    second = go(broken)
    assert second.rows_now == NUM_ROWS - first.rows_done
    assert visible(tmp_path / "broken") == visible(tmp_path / "whole")


def test_a_dead_engine_costs_no_finished_row(source: Path, tmp_path: Path) -> None:
    go(job(source, "whole"))
    with pytest.raises(
        EngineError, match=r"die_after.*\n.*finished rows kept in .*broken.*again to go on"
    ) as died:
        go(job(source, "broken", model="echo:?jitter=40&die_after=30", output__commit_interval_s=100.0))
    kept = status(tmp_path / "broken").rows_done
    assert kept >= 20 and f"{kept} finished rows" in str(died.value)
    assert go(job(source, "broken")).rows_now == NUM_ROWS - kept
    assert visible(tmp_path / "broken") == visible(tmp_path / "whole")


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
    stopped_run(job(source))
    before = visible(tmp_path / "out")
    monkeypatch.setattr(engine_start_module, "start_engine", no_engine)
    with pytest.raises(ResumeError) as refused:
        go(job(source, **CHANGED_JOBS[key]))
    if key == "model":
        assert "model: echo:?jitter=40&batch=8&delay_ms=2 → echo:?fail=row 7" in str(refused.value)
    else:
        assert key in str(refused.value) and "in the first run" in str(refused.value)
    assert "--restart" in str(refused.value)
    assert visible(tmp_path / "out") == before


def test_a_changed_input_file_is_refused_by_its_name(source: Path) -> None:
    stopped_run(job(source))
    texts = [f"other {i}" for i in range(NUM_ROWS)]
    pq.write_table(pa.table({"text": texts, "id": texts}), source)
    with pytest.raises(ResumeError, match=r"(?s)in\.parquet has changed.*start over with --restart"):
        go(job(source))


def test_sizes_and_spellings_may_change(source: Path, tmp_path: Path) -> None:
    # BG-33, second group.
    go(job(source, "whole"))
    stopped_run(job(source))
    changed = job(
        source,
        "../" + tmp_path.name + "/out",
        model="echo:?batch=3",
        engine={"max_num_seqs": 5, "max_num_batched_tokens": 64, "num_threads": 1},
        output__shard_rows=7,
        output__drain_timeout_s=1,
    )
    reporter = Silent()
    assert go(changed, reporter=reporter).exit_code == 0
    assert "output.shard_rows stays 10, as in the first run" in reporter.lines
    assert visible(tmp_path / "out") == visible(tmp_path / "whole")


def test_restart_removes_what_is_ours_and_nothing_else(source: Path, tmp_path: Path) -> None:
    go(job(source))
    out = tmp_path / "out"
    (out / "notes.txt").write_text("mine")
    changed = job(source, prompt={"template": "Tell {{ text }}"}, limit=5)
    assert go(changed, restart=True).rows_done == 5
    assert table(out).column("generated_text")[1].as_py().startswith("Tell row 1|")
    assert table(out).num_rows == 5 and (out / "notes.txt").read_text() == "mine"
    # With nothing there, it is a first run.
    assert go(job(source, "new"), restart=True).rows_done == NUM_ROWS


def test_a_damaged_shard_of_a_finished_job_is_done_again(source: Path, tmp_path: Path) -> None:
    go(job(source))
    expected = visible(tmp_path / "out")
    path = tmp_path / "out" / "data-00002.arrow"
    path.write_bytes(path.read_bytes()[:-100])
    reporter = Silent()
    summary = go(job(source), reporter=reporter)
    assert (summary.rows_now, summary.rows_done, summary.exit_code) == (10, NUM_ROWS, 0)
    assert any("data-00002.arrow is not what was written" in line for line in reporter.lines)
    assert visible(tmp_path / "out") == expected


def test_files_of_somebody_else_are_not_written_over(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "state.json").write_text("{}")
    for restart in (False, True):
        with pytest.raises(ResumeError, match=r"state\.json but no manifest\.json of a job that wrote it"):
            go(job(source), restart=restart)
    assert visible(tmp_path / "out") == {"state.json": b"{}"}


def test_rows_without_a_manifest_are_not_taken_for_those_of_this_job(source: Path, tmp_path: Path) -> None:
    stopped_run(job(source))
    (tmp_path / "out" / ".batchgen" / "manifest.json").unlink()
    for path in (tmp_path / "out").iterdir():
        if path.is_file():
            path.unlink()
    with pytest.raises(ResumeError, match=r"\.segment but no manifest"):
        go(job(source, prompt={"template": "another {{ text }}"}))


@pytest.mark.parametrize("content", ["[]", "null", "7", '{"format": 1}', "{", ""])
def test_a_manifest_that_is_none_is_named(source: Path, tmp_path: Path, content: str) -> None:
    go(job(source))
    (tmp_path / "out" / ".batchgen" / "manifest.json").write_text(content)
    with pytest.raises(ResumeError, match=r"manifest\.json cannot be read .* start over with --restart"):
        go(job(source))
    assert go(job(source), restart=True).rows_now == NUM_ROWS


def test_a_limit_is_raised_and_lifted(source: Path, tmp_path: Path) -> None:
    go(job(source, "whole"))
    first = go(job(source, limit=15))
    assert (first.rows_done, first.rows_total, first.exit_code) == (15, 15, 0)
    assert table(tmp_path / "out").num_rows == 15
    assert go(job(source, limit=15)).was_finished
    assert go(job(source, limit=30)).rows_now == 15
    assert go(job(source, limit=1000)).rows_done == NUM_ROWS
    assert go(job(source)).was_finished
    assert table(tmp_path / "out").equals(table(tmp_path / "whole"))


@pytest.mark.parametrize("num_samples", [1, 2])
def test_a_limit_counts_the_rows_below_it_alone(source: Path, num_samples: int) -> None:
    # Rows 17 and 53 fail: in a sealed shard, and in the journal that a lower limit leaves open.
    texts = [f"row {i}" + " bad" * (i in (17, 53)) for i in range(NUM_ROWS)]
    pq.write_table(pa.table({"text": texts, "id": texts}), source)
    changes = {"model": "echo:?fail=bad", "sampling__n": num_samples}
    whole = go(job(source, **changes))
    assert (whole.exit_code, whole.rows_failed, whole.rows_done) == (3, 2, NUM_ROWS)
    for limit, failed in ((10, 0), (17, 0), (18, 1), (53, 1), (54, 2)):
        found = go(job(source, **changes, limit=limit))
        assert (found.exit_code, found.rows_failed) == (3 if failed else 0, failed)
        assert (found.rows_done, found.rows_total, found.rows_ok) == (limit, limit, limit - failed)
        assert sum(found.finish_reasons.values()) == limit * num_samples - failed * (num_samples - 1)


def test_a_limit_counts_the_journals_rows_below_it_alone(source: Path) -> None:
    spec = job(source, model="echo:?fail=row 1", output__shard_rows=1000)
    kept = stopped_run(spec)
    assert kept.rows_failed and kept.rows_done > 1
    found = go(spec.with_overrides(["limit=1"]))
    assert (found.exit_code, found.rows_failed, found.rows_done) == (0, 0, 1)
    assert (found.failures, found.finish_reasons) == ({}, {"length": 1})


def test_a_source_that_does_not_know_its_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.jsonl"
    # Two whole shards: that they are all is only known once the file has been read.
    path.write_text("".join(json.dumps({"text": f"row {i}"}) + "\n\n" for i in range(20)))
    spec = job(path)
    assert go(spec).rows_total == 20
    monkeypatch.setattr(engine_start_module, "start_engine", no_engine)
    assert go(spec).was_finished
    assert status(tmp_path / "out").state == "finished"
    (tmp_path / "out" / ".batchgen" / "source_rows.json").unlink()
    assert go(spec).rows_total == 20


def test_status_after_a_limit_that_says_less_than_what_is_done(source: Path, tmp_path: Path) -> None:
    lines = tmp_path / "in.jsonl"
    lines.write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(20)))
    go(job(lines, limit=100))
    found = status(tmp_path / "out")
    assert (found.state, found.rows_done, found.rows_total) == ("finished", 20, 20)
    # A limit's run that only repaired, and one after it that found nothing to do.
    go(job(source, "other"))
    (tmp_path / "other" / "data-00000.arrow").unlink()
    go(job(source, "other", limit=30))
    go(job(source, "other"))
    found = status(tmp_path / "other")
    assert (found.state, found.rows_done, found.rows_total) == ("finished", NUM_ROWS, NUM_ROWS)


def test_status_while_the_first_run_loads_its_model(source: Path, tmp_path: Path) -> None:
    stop = StopFlag()
    thread, _ = in_background(job(source, model="echo:?load_s=0.5"), stop)
    try:
        eventually(lambda: holder(tmp_path / "out" / ".batchgen" / "lock"))
        found = status(tmp_path / "out")
    finally:
        thread.join()
    assert (found.state, found.rows_done, found.lines()[-1]) == ("running", 0, "now: loading")


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_an_empty_source_becomes_an_empty_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(engine_start_module, "start_engine", no_engine)
    path, out = tmp_path / f"in.{suffix}", tmp_path / "out"
    if suffix == "csv":
        path.write_text("text\n")
    else:
        pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    reporter = Silent()
    summary = go(job(path), reporter=reporter)
    assert (summary.rows_done, summary.rows_total, summary.exit_code) == (0, 0, 0)
    assert summary.lines() == [f"the input has no rows: {out} holds an empty dataset"]
    written = datasets.load_from_disk(str(out))
    assert written.num_rows == 0
    assert written.column_names[:4] == ["row_index", "source_file", "source_row", "text"]
    assert {"generated_text", "error"} <= set(written.column_names)
    found = status(out)
    assert (found.state, found.rows_done, found.rows_total, found.shards) == ("finished", 0, 0, 1)
    before = visible(out)
    assert set(before) == {"data-00000.arrow", "dataset_info.json", "state.json"}
    assert go(job(path, limit=5), reporter=reporter).was_finished and visible(out) == before
    assert reporter.lines == ["closed", "closed"]
    (out / "data-00000.arrow").unlink()
    assert go(job(path)).was_finished and visible(out) == before
    assert go(job(path), restart=True).rows_total == 0 and visible(out) == before


def test_what_is_wrong_is_found_before_the_engine_starts(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_start_module, "start_engine", no_engine)
    with pytest.raises(BatchgenError, match="texd"):
        go(job(source, prompt={"template": "{{ texd }}"}))
    with pytest.raises(SourceError):
        go(job(source, input={"path": str(tmp_path / "missing.parquet")}))
    with pytest.raises(ConfigError, match="'error' has the name of an output column"):
        go(
            job(source, input={"path": str(source), "rename": {"id": "error"}})
            and job(
                source,
                input={"path": str(source), "rename": {"text": "id2", "id": "error"}},
                prompt={"template": "{{ id2 }}"},
            )
        )
    assert not (tmp_path / "out" / ".batchgen" / "manifest.json").exists()


def test_seeds_of_a_csv_file_are_declared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.csv"
    path.write_text("text,s\na,7\nb,8\n")
    with monkeypatch.context() as patched:
        patched.setattr(engine_start_module, "start_engine", no_engine)
        with pytest.raises(SourceError, match=r"'s' is string.*`input: \{schema: \{s: int64\}\}`"):
            go(job(path, sampling__seed_column="s"))
    declared = job(path, sampling__seed_column="s", input__schema={"s": "int64"})
    assert go(declared).exit_code == 0


def test_a_disk_that_fills_up_stops_the_job_and_keeps_the_rest(source: Path, tmp_path: Path) -> None:
    # BS-19
    class FullDisk(Disk):
        num_segments = 0

        def boundary(self, step: str, path: Path) -> None:
            self.num_segments += step == "rename" and path.suffix == ".segment"
            if step == "write" and self.num_segments:
                raise OSError(28, "No space left on device")

    with pytest.raises(SinkError, match=r"No space left on device.*run the same command again"):
        go(job(source), disk=FullDisk())
    go(job(source))
    go(job(source, "whole"))
    assert visible(tmp_path / "out") == visible(tmp_path / "whole")


def in_background(spec: JobSpec, stop: StopFlag) -> tuple[threading.Thread, list[JobSummary]]:
    done: list[JobSummary] = []
    thread = threading.Thread(target=lambda: done.append(go(spec, stop=stop)))
    thread.start()
    return thread, done


def eventually(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if found := what():
                return found
        except (BatchgenError, OSError):
            pass
        time.sleep(0.01)
    raise AssertionError("it did not happen")


def test_a_running_job_is_watched_and_steered_from_outside(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    num_rows = 800
    pq.write_table(pa.table({"text": [f"row {i}" for i in range(num_rows)]}), source)
    spec = job(
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
    assert go(job(source)).rows_done == num_rows
    assert status(out).state == "finished"


def test_status_of_a_folder_without_a_job(tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match="holds no job"):
        status(tmp_path)


def test_another_kind_of_machine_is_said(source: Path, tmp_path: Path) -> None:
    stopped_run(job(source))
    manifest = tmp_path / "out" / ".batchgen" / "manifest.json"
    stored = json.loads(manifest.read_text())
    stored["environment"]["backend"] = "abacus"
    manifest.write_text(json.dumps(stored))
    reporter = Silent()
    go(job(source), reporter=reporter)
    assert any("backend abacus → echo" in line and "rows may differ" in line for line in reporter.lines)


def test_what_the_first_run_decided_holds_for_the_next(source: Path, tmp_path: Path) -> None:
    stopped_run(job(source, engine={"max_model_len": 1000}))
    go(job(source))
    stored = json.loads((tmp_path / "out" / ".batchgen" / "manifest.json").read_text())
    assert stored["engine"]["max_model_len"] == 1000
    last = [
        event for event in read_events(tmp_path / "out" / ".batchgen" / "events") if event["kind"] == "engine"
    ]
    assert [event["max_model_len"] for event in last] == [1000, 1000]


def test_rows_of_a_file_that_breaks_while_it_is_read(tmp_path: Path) -> None:
    for name in ("a", "b"):
        pq.write_table(pa.table({"text": [f"{name} {i}" for i in range(30)]}), tmp_path / f"{name}.parquet")
    spec = job(tmp_path / "*.parquet")

    class Breaking(Silent):
        def say(self, line: str) -> None:
            # Said when the engine is up, before the second file is opened.
            (tmp_path / "b.parquet").unlink(missing_ok=True)

    with pytest.raises(BatchgenError, match=r"b\.parquet"):
        go(spec, reporter=Breaking())
    assert status(tmp_path / "out").rows_done == 30


def test_an_unknown_column_is_shown_where_the_list_names_it(tmp_path: Path, source: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        f"model: 'echo:'\ninput:\n  path: {source}\n  columns:\n    - text\n    - idd\n"
        "prompt: {template: '{{ text }}'}\noutput: {path: out}\n"
    )
    with pytest.raises(SourceError, match=r"job\.yaml:6: input\.columns\.1: .* did you mean 'id'"):
        go(load_spec(path))
