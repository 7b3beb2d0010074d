"""ChildProcess: the operating system's side of an engine child: start, pipes, stderr, death."""

import logging
import os
import pickle
import queue
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import batchgen
from batchgen.engine import wire

log = logging.getLogger(__name__)

_NUM_STDERR_LINES = 50
_LONGEST_LINE = 2000
_QUEUE_SIZE = 1024
_EXIT_S = 2.0
_LOG_LINE = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) (batchgen\S*): (.*)")


class ChildProcess:
    """A running `python -m batchgen.engine.child`.

    Three threads serve it: one starts it, reads its packets and learns of its end; one writes, taking
    together what has gathered; one reads its stderr and passes log lines on to our own loggers. Queues in
    both directions are bounded: a caller that does not read stops the engine, not the memory.

    Args:
        module: what it imports while it waits for `greet`; None for nothing.
    """

    def __init__(self, module: str | None = None):
        self.packets: queue.Queue[tuple[str, Any] | None] = queue.Queue(_QUEUE_SIZE)
        self.stderr_tail: deque[str] = deque(maxlen=_NUM_STDERR_LINES)
        self._outgoing: queue.Queue[tuple[str, Any] | None] = queue.Queue(_QUEUE_SIZE)
        self._greeting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._is_closing = False
        self._ended = threading.Event()
        self._started = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._error: OSError | None = None
        self._reader = self._spawn(self._run, module)
        self._started.wait()
        if self._error is not None:
            raise self._error

    @property
    def pid(self) -> int:
        """Process id of the child."""
        assert self._process is not None
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self._ended.is_set()

    def greet(self, hello: Any) -> None:
        """Say what it is to be, once; before that it takes no commands."""
        self._greeting.put(hello)

    def send(self, command: str, argument: Any = None) -> None:
        """Queue a command; waits only while the child does not read. Lost without a word once it is gone."""
        while not self.has_ended:
            try:
                return self._outgoing.put((command, argument), timeout=0.5)
            except queue.Full:
                continue

    def close(self, grace_s: float) -> None:
        """Ask it to end, then make it. May be called twice."""
        self._is_closing = True
        with suppress(queue.Full):
            self._outgoing.put_nowait(("shutdown", None))
        if not self._ended.wait(grace_s):
            self.kill()
        self._reader.join()

    def kill(self) -> None:
        """End it at once."""
        self._is_closing = True
        if self._process is not None and not self.has_ended:
            self._process.kill()

    def cause_of_death(self) -> str:
        """How it ended and the last lines of its stderr."""
        assert self._process is not None
        code = self._process.returncode
        if code is None:
            how = "closed its output"
        elif code < 0:
            how = f"was killed by {_signal_name(-code)}"
        else:
            how = f"ended with exit code {code}"
        tail = "\n".join(f"  {line}" for line in self.stderr_tail)
        return f"{how}; the last lines of its stderr:\n{tail}" if tail else f"{how}; its stderr is empty"

    def _run(self, module: str | None) -> None:
        # This thread must be the one that starts the process: the kernel's "die with your parent" means the
        # thread, and this one lives as long as the child. Blocked signals are inherited, so an interrupt of
        # the whole process group cannot hit the child before it has said that it ignores them.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self._process = process = subprocess.Popen(
                [sys.executable, "-P", "-m", "batchgen.engine.child", *([module] if module else [])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=_environment(),
            )
        except OSError as error:
            self._error = error
            return
        finally:
            self._started.set()
        with process:
            stderr_reader = self._spawn(self._read_stderr)
            writer = self._spawn(self._write)
            try:
                self._read_packets()
            finally:
                self._bury(process)
                stderr_reader.join(_EXIT_S)
                self._ended.set()
                self._greeting.put(None)
                with suppress(queue.Full):  # full: it is not waiting for more, but in a write that fails now
                    self._outgoing.put_nowait(None)
                writer.join(_EXIT_S)
                self._offer(None)

    @staticmethod
    def _bury(process: subprocess.Popen[bytes]) -> None:
        """Wait for the end of a child that says no more, and make it end if it does not."""
        try:
            process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _read_packets(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        while (packet := wire.read(self._process.stdout.fileno())) is not None:
            self._offer(pickle.loads(packet))

    def _offer(self, packet: tuple[str, Any] | None) -> None:
        while not self._is_closing:
            try:
                return self.packets.put(packet, timeout=0.5)
            except queue.Full:
                continue

    def _write(self) -> None:
        assert self._process is not None and self._process.stdin is not None
        pipe = self._process.stdin.fileno()
        hello = self._greeting.get()
        if hello is None:
            return
        try:
            wire.write(pipe, wire.encode(hello))
            while (command := self._outgoing.get()) is not None:
                commands = [command]
                while not self._outgoing.empty() and (command := self._outgoing.get()) is not None:
                    commands.append(command)
                wire.write(pipe, wire.encode(commands))
        except OSError:
            pass  # the child is gone; the reader says so
        except Exception as error:
            # Nobody must wait for an answer to what cannot be sent.
            self.stderr_tail.append(f"it could not be sent what it was asked: {error!r}")
            self._process.kill()

    def _read_stderr(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        for raw in self._process.stderr:
            line = raw.decode("utf-8", "replace").rstrip()[:_LONGEST_LINE]
            self.stderr_tail.append(line)
            if match := _LOG_LINE.fullmatch(line):
                level, name, message = match.groups()
                logging.getLogger(name).log(logging.getLevelNamesMapping()[level], "%s", message)
            else:
                log.info("%s", line)

    def _spawn(self, target: Callable[..., None], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, name="batchgen-child", daemon=True)
        thread.start()
        return thread


def _environment() -> dict[str, str]:
    """Ours; when batchgen is imported from a checkout, the child must find the same one."""
    environment = dict(os.environ)
    # A thread that spins at a barrier takes the core from whoever it waits for, as soon as the machine has
    # anything else to do. Some microseconds are worth it, milliseconds (GNU OpenMP's default) are not.
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", "3000")
    root = Path(batchgen.__file__).resolve().parent.parent
    if (root / "pyproject.toml").is_file():
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{known}" if known else str(root)
    return environment


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
