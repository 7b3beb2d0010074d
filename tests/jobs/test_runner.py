"""Whole runs with the echo engine: results, failed rows, wrong jobs, a stop, a source that breaks."""

import threading
import time
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchgen.jobs.engine_start as engine_start_module
from batchgen.engine.child_client import ChildClient
from batchgen.errors import BatchgenError, ConfigError, SourceError
from batchgen.jobs.events import read_events
from batchgen.jobs.layout import OutputFolder
from batchgen.jobs.spec import load_spec
from batchgen.jobs.status import status
from batchgen.jobs.stopping import StopFlag
from batchgen.jobs.summary import JobSummary
from batchgen.jobs.testing import NUM_ROWS, QuietReporter, echo_job, eventually, go, read_shards, visible


def no_engine(*_: Any, **__: Any) -> Any:
    raise AssertionError("the engine was started")


def test_every_row_comes_out_once_in_order_with_its_own_answer(source: Path, tmp_path: Path) -> None:
    # BG-35: equal ids are data; a row's own place is its key.
    reporter = QuietReporter()
    summary = go(echo_job(source), reporter=reporter)
    written = read_shards(tmp_path / "out")
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


def test_failed_rows_are_rows_of_the_output(source: Path, tmp_path: Path) -> None:
    spec = echo_job(source, model="echo:?fail=row 7")
    summary = go(spec)
    written = read_shards(tmp_path / "out").to_pylist()
    failed = [row["row_index"] for row in written if row["error"] is not None]
    assert failed == [7] and written[7]["finish_reason"] == "error" and written[7]["generated_text"] is None
    assert summary.exit_code == 3 and summary.failures == {"engine_error": 1}
    assert "1 row failed (engine_error 1)" in summary.lines()[1]
    # Failed rows are done: they are not run again by themselves.
    again = go(spec)
    assert again.was_finished and again.exit_code == 3 and again.failures == {"engine_error": 1}


def test_a_failed_row_of_several_samples_has_a_reason_for_each(source: Path, tmp_path: Path) -> None:
    spec = echo_job(source, sampling={"n": 2, "max_tokens": 500}, prompt={"template": "{{ text }}"})
    summary = go(spec.with_overrides(["engine.max_model_len=100", "limit=3"]))
    first = read_shards(tmp_path / "out").to_pylist()[0]
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


def test_cut_texts_are_warned_of(source: Path) -> None:
    # BS-13
    assert any("cut off" in line for line in go(echo_job(source, "a", sampling={"max_tokens": 5})).lines())
    assert not any("cut off" in line for line in go(echo_job(source, "b")).lines())


def test_the_start_says_the_jobs_seed(source: Path) -> None:
    reporter = QuietReporter()
    go(echo_job(source, sampling={"seed": 7, "max_tokens": 5}), reporter=reporter)
    assert "sampling.seed=7 (job)" in reporter.lines


def test_what_is_wrong_is_found_before_the_engine_starts(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_start_module, "start_engine", no_engine)
    with pytest.raises(BatchgenError, match="texd"):
        go(echo_job(source, prompt={"template": "{{ texd }}"}))
    with pytest.raises(SourceError):
        go(echo_job(source, input={"path": str(tmp_path / "missing.parquet")}))
    with pytest.raises(ConfigError, match="'error' has the name of an output column"):
        go(
            echo_job(source, input={"path": str(source), "rename": {"id": "error"}})
            and echo_job(
                source,
                input={"path": str(source), "rename": {"text": "id2", "id": "error"}},
                prompt={"template": "{{ id2 }}"},
            )
        )
    assert not (tmp_path / "out" / ".batchgen" / "manifest.json").exists()


def test_an_unknown_column_is_shown_where_the_list_names_it(tmp_path: Path, source: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        f"model: 'echo:'\ninput:\n  path: {source}\n  columns:\n    - text\n    - idd\n"
        "prompt: {template: '{{ text }}'}\noutput: {path: out}\n"
    )
    with pytest.raises(SourceError, match=r"job\.yaml:6: input\.columns\.1: .* did you mean 'id'"):
        go(load_spec(path))


def test_seeds_of_a_csv_file_are_declared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.csv"
    path.write_text("text,s\na,7\nb,8\n")
    with monkeypatch.context() as patched:
        patched.setattr(engine_start_module, "start_engine", no_engine)
        with pytest.raises(SourceError, match=r"'s' is string.*`input: \{schema: \{s: int64\}\}`"):
            go(echo_job(path, sampling__seed_column="s"))
    declared = echo_job(path, sampling__seed_column="s", input__schema={"s": "int64"})
    assert go(declared).exit_code == 0


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
    reporter = QuietReporter()
    summary = go(echo_job(path), reporter=reporter)
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
    assert go(echo_job(path, limit=5), reporter=reporter).was_finished and visible(out) == before
    assert reporter.lines == ["closed", "closed"]
    (out / "data-00000.arrow").unlink()
    assert go(echo_job(path)).was_finished and visible(out) == before
    assert go(echo_job(path), restart=True).rows_total == 0 and visible(out) == before


def test_rows_of_a_file_that_breaks_while_it_is_read(tmp_path: Path) -> None:
    for name in ("a", "b"):
        pq.write_table(pa.table({"text": [f"{name} {i}" for i in range(30)]}), tmp_path / f"{name}.parquet")
    spec = echo_job(tmp_path / "*.parquet")

    class Breaking(QuietReporter):
        def say(self, line: str) -> None:
            # Said when the engine is up, before the second file is opened.
            (tmp_path / "b.parquet").unlink(missing_ok=True)

    with pytest.raises(BatchgenError, match=r"b\.parquet"):
        go(spec, reporter=Breaking())
    assert status(tmp_path / "out").rows_done == 30


def test_a_stop_ends_soon_however_long_a_step_takes(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(config: Any, tokenizer: Any, **_: Any) -> ChildClient:
        return ChildClient(config, tokenizer, executor="batchgen.counting:load_stuck")

    monkeypatch.setattr(engine_start_module, "start_engine", stuck)
    spec = echo_job(source, output__drain_timeout_s=1, prompt={"template": "A", "add_special_tokens": False})
    stop, reporter = StopFlag(), QuietReporter()
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
