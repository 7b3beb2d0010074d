import re
import subprocess
import sys
from pathlib import Path

import pytest

import batchgen.cli.main
from batchgen.cli import exit_codes
from batchgen.errors import (
    BatchgenError,
    CapacityError,
    ConfigError,
    EngineError,
    ResumeError,
    SinkError,
    SourceError,
)


def test_version(invoke) -> None:
    done = invoke("--version")
    assert (done.code, done.err) == (0, "")
    assert re.fullmatch(r"batchgen \S+\n", done.out)


def test_help_names_the_commands(invoke) -> None:
    done = invoke("--help")
    assert done.code == 0
    for command in ("run", "status", "generate"):
        assert f"\n  {command} " in done.out
    assert "..." not in done.out.partition("Commands:")[2]  # none is cut off


@pytest.mark.parametrize(
    "arguments", [(), ("rum",), ("run",), ("run", "a", "b"), ("run", "a", "--limit", "x")]
)
def test_wrong_usage_is_exit_code_2(invoke, arguments) -> None:
    done = invoke(*arguments)
    assert done.code == exit_codes.USAGE
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError, 2),
        (SourceError, 2),
        (ResumeError, 2),
        (CapacityError, 1),
        (EngineError, 1),
        (SinkError, 1),
        (BatchgenError, 1),
    ],
)
def test_an_error_of_ours_is_one_message(invoke, monkeypatch, error, code) -> None:
    def fail(**_: object) -> None:
        raise error("what went wrong")

    monkeypatch.setattr(batchgen.cli.main, "app", fail)
    done = invoke("run", "job.yaml")
    assert (done.code, done.out, done.err) == (code, "", "error: what went wrong\n")


def test_a_mistake_of_ours_shows_where_it_happened(invoke, monkeypatch) -> None:
    def fail(**_: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(batchgen.cli.main, "app", fail)
    done = invoke("run", "job.yaml")
    assert done.code == 1
    assert "Traceback" in done.err
    assert "ZeroDivisionError: oh" in done.err
    assert "mistake in batchgen" in done.err


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["run", "--help"], ["status", "no-such-folder"]]
)
def test_light_commands_load_nothing_heavy(arguments) -> None:
    script = (
        "import sys\n"
        "from batchgen.cli.main import main\n"
        f"sys.argv = ['batchgen', *{arguments!r}]\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'triton', 'datasets'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full is Linux's")
@pytest.mark.parametrize(
    "arguments", [("--help",), ("generate", "-m", "echo:", "-p", "hi", "--max-tokens", "2")]
)
def test_a_full_disk_behind_standard_output_is_one_message(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "batchgen.cli", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == exit_codes.FAILED
    assert done.stderr.splitlines()[-1] == "error: cannot write to standard output: No space left on device"
    assert "Traceback" not in done.stderr


def test_an_error_of_a_file_is_not_taken_for_one_of_standard_output(invoke, monkeypatch) -> None:
    def fail(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(batchgen.cli.main, "app", fail)
    done = invoke("run", "job.yaml")
    assert "this is a mistake in batchgen" in done.err
    assert done.code == exit_codes.FAILED
