import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest

from batchgen.tiny_adapters import write_adapter

COMMAND = [sys.executable, "-m", "batchgen.cli"]


def rows(folder: Path) -> list[dict]:
    found = []
    for path in sorted(folder.glob("*.arrow")):
        with pa.ipc.open_stream(path) as stream:
            found += stream.read_all().to_pylist()
    return found


def test_a_job_runs_and_says_where_the_results_are(invoke, make_job, tmp_path) -> None:
    done = invoke("run", make_job(rows=5))
    assert done.code == 0, done.err
    assert "5 of 5 rows done" in done.out
    assert "results: out" in done.out
    found = rows(tmp_path / "out")
    assert [row["id"] for row in found] == [0, 1, 2, 3, 4]
    assert all(f"row {row['id']}" in row["generated_text"] for row in found)


def test_a_finished_job_is_found_finished(invoke, make_job) -> None:
    job = make_job(rows=3)
    assert invoke("run", job).code == 0
    again = invoke("run", job)
    assert again.code == 0
    assert "nothing to do" in again.out
    assert "loading" not in again.err


def test_the_command_line_wins_over_the_file(invoke, make_job, tmp_path) -> None:
    done = invoke("run", make_job(), "--limit", 2, "--output", "other", "--set", "sampling.max_tokens=3")
    assert done.code == 0, done.err
    found = rows(tmp_path / "other")
    assert [row["num_generated_tokens"] for row in found] == [3, 3]
    assert not (tmp_path / "out").exists()


def test_failed_rows_are_exit_code_3(invoke, make_job, tmp_path) -> None:
    done = invoke("run", make_job(model="echo:?fail=row 2", rows=4))
    assert done.code == 3
    assert "1 row failed" in done.out
    assert [row["error"] is None for row in rows(tmp_path / "out")] == [True, True, False, True]


def test_adapters_are_shown_at_the_start_and_counted_at_the_end(invoke, make_job, tmp_path) -> None:
    shapes = {"model.layers.0.self_attn.q_proj": (8, 8)}
    write_adapter(tmp_path / "adapters" / "mine", shapes, rank=6)
    job = make_job(more="lora: {adapters: {mine: adapters/mine}}\n")
    done = invoke("run", job, "--set", "prompt.adapter=mine")
    assert done.code == 0, done.err
    assert "adapter mine: rank 6, 1 module (adapters/mine)" in done.err.splitlines()
    assert "adapters: mine 5 rows" in done.out.splitlines()
    told = invoke("run", job, "--set", "prompt.adapter=mine", "--restart", "--progress", "json")
    assert json.loads(told.err.splitlines()[-1])["summary"]["adapters"] == {"mine": 5}


def test_an_adapter_that_is_not_there_is_exit_code_2(invoke, make_job) -> None:
    more = "lora: {adapters: {mine: adapters/mine}}\n"
    done = invoke("run", make_job(more=more), "--set", "prompt.adapter=mine")
    assert done.code == 2
    assert done.err.startswith("error: ") and "job.yaml:8: lora.adapters.mine: no such folder" in done.err


def test_a_wrong_job_file_is_exit_code_2_and_leaves_nothing(invoke, make_job, tmp_path) -> None:  # BG-39
    done = invoke("run", make_job(more="samplign: {temprature: 1}\n"))
    assert done.code == 2
    assert "job.yaml:8: samplign" in done.err
    assert "did you mean 'sampling'" in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("sampling.temprature=1", ["--set sampling.temprature=1", "did you mean 'temperature'"]),
        ("sampling.stop=[no, 5]", ["quote it"]),
        ("sampling.max_tokens=64.5", ["must be a whole number", "64.5"]),
        ("sampling.top_p=2", ["top_p", "at most 1", "2"]),
        ("nonsense", ["section.key=value"]),
    ],
)
def test_a_wrong_override_is_exit_code_2(invoke, make_job, setting, words) -> None:  # BG-39
    done = invoke("run", make_job(), "--set", setting)
    assert done.code == 2
    for word in words:
        assert word in done.err


def test_numbers_of_yaml_1_2_are_numbers(invoke, make_job) -> None:  # BG-39
    settings = ("sampling.min_p=1e-5", "sampling.temperature=1e-1", "sampling.max_tokens='4'")
    done = invoke("run", make_job(), *[part for setting in settings for part in ("--set", setting)])
    assert done.code == 0, done.err


def test_a_job_file_that_is_not_there(invoke, tmp_path) -> None:
    done = invoke("run", tmp_path / "no-such.yaml")
    assert done.code == 2
    assert "no-such.yaml" in done.err


def test_a_changed_job_is_refused_and_restart_starts_over(invoke, make_job, tmp_path) -> None:
    job = make_job(rows=3)
    assert invoke("run", job).code == 0
    changed = invoke("run", job, "--set", "sampling.max_tokens=2")
    assert changed.code == 2
    assert "max_tokens" in changed.err
    assert invoke("run", job, "--set", "sampling.max_tokens=2", "--restart").code == 0
    assert [row["num_generated_tokens"] for row in rows(tmp_path / "out")] == [2, 2, 2]


def test_quiet_prints_nothing(invoke, make_job) -> None:
    done = invoke("run", make_job(), "--quiet")
    assert (done.code, done.out, done.err) == (0, "", "")


def test_progress_for_programs_is_json(invoke, make_job) -> None:  # BS-25
    done = invoke("run", make_job(rows=4), "--progress", "json")
    objects = [json.loads(line) for line in done.err.splitlines()]
    states = [each for each in objects if "phase" in each]
    assert states[-1]["rows_done"] == 4
    summary = objects[-1]["summary"]
    assert (summary["rows_done"], summary["exit_code"], summary["output"]) == (4, 0, "out")
    assert done.out == ""
    refused = invoke("run", make_job(rows=4), "--progress", "json", "--set", "sampling.max_tokens=3")
    assert refused.code == 2
    assert json.loads(refused.err.splitlines()[-1])["exit_code"] == 2


def test_a_log_file_gets_few_plain_lines(make_job, tmp_path) -> None:  # BS-25
    job = make_job(model="echo:?delay_ms=1&batch=4", rows=500)
    with (tmp_path / "log").open("wb") as log:
        done = subprocess.run([*COMMAND, "run", job], stdout=log, stderr=log, check=False)
    text = (tmp_path / "log").read_bytes()
    assert done.returncode == 0, text
    assert b"\r" not in text
    assert b"\x1b" not in text
    assert text.count(b"\n") < 30


def test_a_terminal_gets_a_bar_and_a_dumb_one_lines(make_job, on_a_terminal) -> None:  # BS-25
    job = make_job(model="echo:?delay_ms=2&batch=4", rows=60)
    drawn = on_a_terminal(["run", str(job)], "xterm")
    assert "/60 rows" in drawn
    assert "\r" in drawn
    assert "\x1b[3" not in drawn  # no colours
    plain = on_a_terminal(["run", str(job), "--restart"], "dumb")
    assert "\r" not in plain
    assert "\x1b" not in plain
    assert "60 of 60 rows done" in plain


def test_a_terminal_without_a_size_gets_lines(make_job, on_a_terminal) -> None:
    plain = on_a_terminal(["run", str(make_job())], "xterm", size=(0, 0))
    assert "\r" not in plain
    assert "starting the engine\n" in plain


def test_ctrl_c_saves_progress_and_the_same_command_goes_on(invoke, make_job, tmp_path) -> None:
    job = make_job(model="echo:?delay_ms=20&batch=2", rows=40)
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [*COMMAND, "run", job, "--set", "output.commit_interval_s=0.1"], stderr=log
        )
        deadline = time.monotonic() + 60
        while (
            not list((tmp_path / "out" / ".batchgen" / "segments").glob("*")) and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130, (tmp_path / "log").read_text()
    status = invoke("status", "out", "--json")
    done_before = json.loads(status.out)["rows_done"]
    assert 0 < done_before < 40
    done = invoke("run", job, "--set", "model='echo:'")
    assert done.code == 0, done.err
    assert f"({40 - done_before} of them in this run" in done.out
    assert [row["id"] for row in rows(tmp_path / "out")] == list(range(40))
