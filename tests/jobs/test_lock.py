"""One run an output folder: the second refused by name, a dead run's lock taken over."""

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from batchgen.errors import ResumeError, SinkError
from batchgen.jobs.lock import OutputLock, holder

HOLD = """
import sys, time
from pathlib import Path
from batchgen.jobs.lock import OutputLock
lock = OutputLock(Path(sys.argv[1]))
# A program that the holder starts and that outlives it.
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
print(child.pid, flush=True)
time.sleep(60)
"""


@contextmanager
def other_run(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock, and one that it has started, which outlives it."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            yield process
        finally:
            process.kill()
            os.kill(child, signal.SIGKILL)


def test_second_run_is_refused_with_pid_host_and_start(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with other_run(path) as process:
        with pytest.raises(ResumeError) as refused:
            OutputLock(path)
        assert f"process {process.pid} on {socket.gethostname()}, started 20" in str(refused.value)
        held_by = holder(path)
        assert held_by is not None and held_by.pid == process.pid


def test_dead_runs_lock_is_taken_over_though_its_child_lives(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with other_run(path) as process:
        process.kill()
        process.wait()
        assert holder(path) is None
        with OutputLock(path) as lock:
            assert lock.dead_holder is not None and lock.dead_holder.pid == process.pid
            held_by = holder(path)
            assert held_by is not None and held_by.pid == os.getpid()


def test_released_lock_names_nobody(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    OutputLock(path).release()
    assert holder(path) is None
    with OutputLock(path) as lock:
        assert lock.dead_holder is None


def test_a_look_at_the_holder_does_not_keep_a_run_out(tmp_path: Path) -> None:
    import fcntl
    import threading

    path = tmp_path / "lock"
    path.touch()
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        timer = threading.Timer(0.1, fcntl.flock, (file, fcntl.LOCK_UN))
        timer.start()
        OutputLock(path).release()
        timer.join()


def test_a_full_disk_is_an_error_that_names_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(SinkError, match=r"cannot write .*lock: No space left on device"):
        OutputLock(tmp_path / "lock")
    monkeypatch.undo()
    OutputLock(tmp_path / "lock").release()
