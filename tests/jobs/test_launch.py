"""When a job's engine process begins: at once in a first run, in others once it is known to be needed."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchgen.errors import SourceError
from batchgen.jobs import engine_start
from batchgen.jobs import launch as module
from batchgen.jobs.launch import launch
from batchgen.jobs.testing import QuietReporter, echo_job


class Begun:
    """Stands for a process; the echo engine needs none."""

    def __init__(self) -> None:
        self.is_killed = False

    def kill(self) -> None:
        self.is_killed = True


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Begun]:
    made: list[Begun] = []

    def begin(config: Any) -> Begun:
        made.append(Begun())
        return made[-1]

    monkeypatch.setattr(module, "begin_engine", begin)
    return made


def test_a_first_run_begins_its_engine_and_a_finished_one_does_not(source: Path, begun: list[Begun]) -> None:
    assert launch(echo_job(source), reporter=QuietReporter()).exit_code == 0
    assert [each.is_killed for each in begun] == [True]
    assert launch(echo_job(source), reporter=QuietReporter()).was_finished
    assert len(begun) == 1
    launch(echo_job(source), restart=True, reporter=QuietReporter())
    assert len(begun) == 2


def test_the_job_takes_the_engine_that_was_begun(
    source: Path, begun: list[Begun], monkeypatch: pytest.MonkeyPatch
) -> None:
    start, given = engine_start.start_engine, []

    def noting(*arguments: Any, **options: Any) -> Any:
        given.append(options["begun"])
        return start(*arguments, **options)

    monkeypatch.setattr(engine_start, "start_engine", noting)
    launch(echo_job(source), reporter=QuietReporter())
    assert given == begun


def test_an_engine_that_is_not_needed_after_all_is_ended(source: Path, begun: list[Begun]) -> None:
    with pytest.raises(SourceError):
        launch(echo_job(source, input={"path": "not-there.parquet"}), reporter=QuietReporter())
    assert [each.is_killed for each in begun] == [True]


def test_the_engine_is_begun_before_what_reads_rows_is_imported(source: Path) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from batchgen.jobs import launch\n"
        "from batchgen.jobs.spec import load_spec\n"
        "def begin(config):\n"
        "    heavy = {'numpy', 'pyarrow', 'jinja2', 'batchgen.engine.core'} & set(sys.modules)\n"
        "    sys.exit(', '.join(sorted(heavy)) or 0)\n"
        "launch.begin_engine = begin\n"
        "launch.launch(load_spec(Path('job.yaml')))"
    )
    (source.parent / "job.yaml").write_text(
        "model: some/model\ninput: {path: in.parquet}\n"
        "prompt: {template: '{{ text }}'}\noutput: {path: out}\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=source.parent, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
