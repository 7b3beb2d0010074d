"""Real processes of the real command: killed, interrupted, out of disk, run twice; no model needed."""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.jobs.testing import visible

NUM_ROWS = 400
RUN = [sys.executable, "-m", "batchgen.cli", "run", "job.yaml"]
JOB = """
model: {model}
input:
  path: in.parquet
prompt:
  template: "Say {{{{ text }}}}"
sampling:
  max_tokens: 60
  temperature: 1
output:
  path: out
  shard_rows: 50
  commit_interval_s: {commit_interval_s}
"""


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def make_job(
    folder: Path, *, delay_ms: float = 2, options: str = "", commit_interval_s: float = 0.02
) -> None:
    """A job file and its input; about a second and a half at a delay of 2 ms."""
    folder.mkdir(exist_ok=True)
    texts = [f"row {i} " + "x" * (i * 7 % 30) for i in range(NUM_ROWS)]
    pq.write_table(pa.table({"text": texts}), folder / "in.parquet")
    model = f"echo:?delay_ms={delay_ms}&batch=16&jitter=20{options}"
    job = JOB.format(model=model, commit_interval_s=commit_interval_s)
    (folder / "job.yaml").write_text(job, encoding="utf-8")


def start(folder: Path, *arguments: str, preexec: Callable[[], None] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*RUN, *arguments],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=preexec,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 60) -> tuple[int, str]:
    """Exit code and everything it wrote."""
    out, err = process.communicate(timeout=timeout_s)
    return process.returncode, out + err


def committed(folder: Path) -> set[str]:
    """Names of all segments and shards."""
    places = (folder / "out" / ".batchgen" / "segments", folder / "out")
    return {name for place in places if place.is_dir() for name in os.listdir(place)}


def wait_for_commit(folder: Path, process: subprocess.Popen[str], before: set[str]) -> None:
    """Until the process has committed something that was not there before, or has ended."""
    deadline = time.monotonic() + 60
    while committed(folder) <= before | {".batchgen"} and process.poll() is None:
        assert time.monotonic() < deadline, "nothing was committed"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What an unbroken run writes."""
    folder = tmp_path_factory.mktemp("whole")
    make_job(folder, delay_ms=0)
    code, text = finish(start(folder))
    assert code == 0, text
    return visible(folder / "out")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_twenty_kills_at_random_moments(tmp_path: Path, whole: dict[str, bytes]) -> None:
    moments = random.Random(20)
    make_job(tmp_path, delay_ms=8)
    num_kills = 0
    while num_kills < 20:
        before = committed(tmp_path)
        process = start(tmp_path, "--quiet")
        # The moment counts from the first commit or, every fifth time, from the start of the process.
        if num_kills % 5:
            wait_for_commit(tmp_path, process, before)
            time.sleep(moments.uniform(0, 0.25))
        else:
            time.sleep(moments.uniform(0.2, 1.0))
        if process.poll() is not None:
            # Done before it could be killed: begin again.
            assert finish(process)[0] == 0
            assert visible(tmp_path / "out") == whole
            assert finish(start(tmp_path, "--quiet", "--restart"))[0] == 0
            continue
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        num_kills += 1
    code, text = finish(start(tmp_path))
    assert code == 0, text
    assert visible(tmp_path / "out") == whole
    parts = [pa.ipc.open_stream(path).read_all() for path in sorted((tmp_path / "out").glob("*.arrow"))]
    assert pa.concat_tables(parts).column("row_index").to_pylist() == list(range(NUM_ROWS))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_saves_and_the_same_command_goes_on(
    tmp_path: Path, whole: dict[str, bytes], number: signal.Signals, code: int
) -> None:
    make_job(tmp_path, delay_ms=8)
    process = start(tmp_path)
    wait_for_commit(tmp_path, process, set())
    # As a terminal does it: to the whole group.
    os.killpg(process.pid, number)
    stopped_at = time.monotonic()
    got, text = finish(process)
    assert time.monotonic() - stopped_at < 10
    assert got == code, text
    assert "stopped:" in text and "run the same command again to go on" in text
    assert "Traceback" not in text
    make_job(tmp_path, delay_ms=0)
    got, text = finish(start(tmp_path))
    assert got == 0, text
    assert visible(tmp_path / "out") == whole


def test_the_second_signal_stops_at_once(tmp_path: Path, whole: dict[str, bytes]) -> None:
    # Rows take a minute each: the first signal alone would wait for them for five seconds.
    make_job(tmp_path, delay_ms=1000)
    process = start(tmp_path)
    lock = tmp_path / "out" / ".batchgen" / "manifest.json"
    while not lock.exists():
        time.sleep(0.01)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    stopped_at = time.monotonic()
    code, text = finish(process)
    assert time.monotonic() - stopped_at < 3
    assert code == 130 and "Traceback" not in text
    make_job(tmp_path, delay_ms=0)
    assert finish(start(tmp_path))[0] == 0
    assert visible(tmp_path / "out") == whole


def test_a_signal_while_the_model_loads(tmp_path: Path) -> None:
    make_job(tmp_path, delay_ms=0, options="&load_s=30")
    process = start(tmp_path)
    events = tmp_path / "out" / ".batchgen" / "events"
    while not (events.is_dir() and any(events.iterdir())):
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    code, text = finish(process, timeout_s=10)
    assert code == 130 and "Traceback" not in text


def test_a_second_run_is_refused_and_a_killed_runs_lock_is_taken_over(
    tmp_path: Path, whole: dict[str, bytes]
) -> None:
    make_job(tmp_path, delay_ms=15)
    first = start(tmp_path)
    wait_for_commit(tmp_path, first, set())
    code, text = finish(start(tmp_path))
    assert code in (1, 2) and f"process {first.pid} on " in text and "started 20" in text
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    make_job(tmp_path, delay_ms=0)
    code, text = finish(start(tmp_path))
    assert code == 0 and f"process {first.pid} on " in text
    assert visible(tmp_path / "out") == whole


def test_a_file_size_limit_stops_the_job_with_the_path(tmp_path: Path, whole: dict[str, bytes]) -> None:
    # BS-19, with the system itself refusing to write.
    make_job(tmp_path, delay_ms=0, commit_interval_s=60)

    def limit_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000))

    code, text = finish(start(tmp_path, preexec=limit_files))
    assert code == 1, text
    assert "error: cannot write" in text and ".batchgen" in text and "bytes: File too large" in text
    assert "Traceback" not in text
    assert not list((tmp_path / "out").glob("data-*"))
    make_job(tmp_path, delay_ms=0)
    assert finish(start(tmp_path))[0] == 0
    assert visible(tmp_path / "out") == whole


LOOK = """
import sys
sys.modules["batchgen"] = None
try:
    import batchgen
except ImportError:
    pass
else:
    raise SystemExit("batchgen can be imported")
import datasets, pyarrow as pa
loaded = datasets.load_from_disk("out")
files = datasets.load_dataset("arrow", data_files="out/*.arrow", split="train")
with pa.ipc.open_stream("out/data-00000.arrow") as stream:
    first = stream.read_all()
print(loaded.num_rows, files.num_rows, first.num_rows)
print(loaded[7]["generated_text"] == files[7]["generated_text"] == first["generated_text"][7].as_py())
print(loaded.column_names)
"""


def test_results_load_where_batchgen_cannot_be_imported(tmp_path: Path) -> None:
    make_job(tmp_path, delay_ms=0)
    assert finish(start(tmp_path))[0] == 0
    done = subprocess.run([sys.executable, "-c", LOOK], cwd=tmp_path, text=True, capture_output=True)
    lines = done.stdout.splitlines()
    assert lines[:2] == ["400 400 50", "True"], done.stderr
    assert "generated_text" in lines[2] and "row_index" in lines[2]


WATCH_IMPORTS = """
import sys
from batchgen.cli.main import main
sys.argv = ["batchgen", "run", "job.yaml"]
try:
    main()
finally:
    heavy = {"torch", "transformers", "datasets", "triton"} & set(sys.modules)
    print("heavy:", sorted(heavy))
"""


def test_a_finished_job_loads_nothing_heavy(tmp_path: Path) -> None:
    make_job(tmp_path, delay_ms=0)
    assert finish(start(tmp_path))[0] == 0
    done = subprocess.run([sys.executable, "-c", WATCH_IMPORTS], cwd=tmp_path, text=True, capture_output=True)
    assert done.returncode == 0 and "done before" in done.stdout
    assert "heavy: []" in done.stdout
