"""Running commands: in this process for speed, and small jobs on the echo engine for them to run."""

import json
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Outcome:
    """What a command left: its exit code and what it printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def invoke(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """invoke("run", "job.yaml") -> Outcome, by the same function that the installed script calls."""
    from batchgen.cli.main import main

    def call(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["batchgen", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capfd.readouterr()
        return Outcome(ended.value.code, printed.out, printed.err)

    return call


@pytest.fixture
def make_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """make_job(model="echo:", rows=5) writes rows.jsonl and job.yaml into an own folder, and goes there."""
    monkeypatch.chdir(tmp_path)

    def make(model: str = "echo:", rows: int = 5, more: str = "") -> Path:
        lines = [json.dumps({"id": number, "text": f"row {number}"}) for number in range(rows)]
        (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        job = tmp_path / "job.yaml"
        job.write_text(
            f"model: {json.dumps(model)}\n"
            "input: {path: rows.jsonl}\n"
            "prompt:\n"
            "  template: 'say {{ text }}'\n"
            "sampling:\n"
            "  max_tokens: 64\n"
            "output: {path: out}\n" + more,
            encoding="utf-8",
        )
        return job

    return make


@pytest.fixture
def on_a_terminal() -> Callable[..., str]:
    """on_a_terminal(["run", "job.yaml"], "xterm", size=(24, 100)): what the command prints there."""

    def call(arguments: list[str], term: str, size: tuple[int, int] = (24, 100)) -> str:
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, size)
        environment = os.environ | {"TERM": term, "NO_COLOR": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", "batchgen.cli", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            close_fds=True,
        )
        os.close(theirs)
        printed = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            printed += piece
        os.close(ours)
        assert process.wait() == 0, printed
        return printed.decode().replace("\r\n", "\n")

    return call
