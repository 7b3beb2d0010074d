"""Real processes with a real (tiny, random) model in a child: same bytes after kills, no orphan left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.jobs.testing import visible

NUM_ROWS = 120
JOB = """
model: model
input:
  path: in.parquet
prompt:
  template: "{{ text }}"
engine:
  reproducible: true
  max_num_seqs: 4
  num_threads: 1
  num_gpu_blocks_override: 24
sampling:
  temperature: 1
  max_tokens: 60
  ignore_eos: true
output:
  path: out
  shard_rows: 25
  commit_interval_s: 0.05
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from batchgen.tiny_models import tiny_model, write_folder

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_folder(tiny_model(), tmp_path / "model")
    texts = [f"row {i} " + "x" * (i * 7 % 40) for i in range(NUM_ROWS)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "in.parquet")
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "batchgen.cli", "run", "job.yaml", "--progress", "log", *arguments]
    return subprocess.Popen(
        command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def children(pid: int) -> list[int]:
    # A child belongs to the thread that started it.
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


def segments(folder: Path) -> set[str]:
    place = folder / "out" / ".batchgen" / "segments"
    return set(os.listdir(place)) if place.is_dir() else set()


def wait_for_new_segment(folder: Path, before: set[str]) -> None:
    deadline = time.monotonic() + 90
    while segments(folder) <= before:
        assert time.monotonic() < deadline, "nothing was committed"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_runs_leave_no_child_and_the_same_bytes(job: Path) -> None:
    whole = start(job, "--output", "whole")
    _, err = whole.communicate(timeout=100)
    assert whole.returncode == 0, err
    for victim in ("parent", "child"):
        before = segments(job)
        process = start(job)
        wait_for_new_segment(job, before)
        engines = children(process.pid)
        assert engines
        os.kill(process.pid if victim == "parent" else engines[0], signal.SIGKILL)
        _, err = process.communicate(timeout=60)
        if victim == "child":
            assert process.returncode == 1
            assert "SIGKILL" in err and "kept in out" in err and "Traceback" not in err
        deadline = time.monotonic() + 5
        while any(map(is_alive, engines)):
            assert time.monotonic() < deadline, "the engine outlived its parent"
            time.sleep(0.02)
    last = start(job)
    _, err = last.communicate(timeout=100)
    assert last.returncode == 0, err
    assert visible(job / "out") == visible(job / "whole")
