"""Loaded: an engine in a process of its own, asked for one case after the other."""

import json
import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks import record


class Ended(Exception):
    """The process is gone; the text says how, with the last lines of its log."""


class Loaded:
    """Starts the process; `answer` waits until the engine is loaded.

    Args:
        python: the interpreter of the engine's environment.
        order: what `benchmarks.peers.child` is told.
        folder: for its order and log, of a name of its own.
    """

    def __init__(self, python: str, order: Mapping[str, Any], folder: Path, name: str):
        path, self._log = folder / f"{name}.json", folder / f"{name}.log"
        path.write_text(json.dumps(order), encoding="utf-8")
        reading, writing = os.pipe()
        with self._log.open("w") as output:
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.peers.child", str(path), str(writing)],
                cwd=record.ROOT,
                env=_environment(python, order["engine"]),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[writing],
                text=True,
            )
        os.close(writing)
        self._answers = os.fdopen(reading, encoding="utf-8")

    def answer(self) -> dict[str, Any]:
        """The next line: first what loading came to.

        Raises:
            Ended: there is none.
        """
        line = self._answers.readline()
        if not line:
            code = self._process.wait()
            last = self._log.read_text(errors="replace").splitlines()[-12:]
            raise Ended(f"ended with {code}:\n" + "\n".join(last))
        found: dict[str, Any] = json.loads(line)
        return found

    def run(self, case: str) -> dict[str, Any]:
        """Run a case and return what it came to.

        Raises:
            Ended: the process is gone.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(case + "\n")
            self._process.stdin.flush()
        return self.answer()

    def close(self, patience_s: float = 30) -> None:
        """Let it end, or end it."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()


def _environment(python: str, engine: str) -> dict[str, str]:
    """The engine's environment first on PATH; vLLM's OpenMP runtime is the one that its manual preloads."""
    bin_folder = Path(python).absolute().parent
    environment = dict(os.environ, PATH=f"{bin_folder}{os.pathsep}{os.environ.get('PATH', '')}")
    openmp = bin_folder.parent / "lib" / "libiomp5.so"
    if engine == "vllm" and openmp.is_file():
        environment["LD_PRELOAD"] = str(openmp)
    return environment
