"""`python -m batchgen.engine.child`: one EngineCore in a process of its own, talking over stdin and stdout.

The first packet it reads is a Hello; a module named on the command line is imported before. Logs and stray
prints go to stderr. It ends when told to, when its stdin ends, and within a second of its parent's death
whatever it is doing.
"""

import ctypes
import faulthandler
import gc
import logging
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from importlib import import_module
from typing import Any

from batchgen.engine import wire
from batchgen.engine.core import EngineCore
from batchgen.engine.loading import load_core, telling
from batchgen.errors import BatchgenError

STATS_INTERVAL_S = 0.25
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Load, tell that we are ready, and serve until told to end."""
    inbox, outbox = _claim_pipes()
    _ignore_signals()
    faulthandler.enable()
    _import_for_good(sys.argv[1:])
    content = wire.read(inbox)
    if content is None:
        return 1
    hello: wire.Hello = pickle.loads(content)
    _die_with(hello.parent_pid)
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("batchgen").setLevel(hello.log_level)

    def tell(what: str) -> None:
        wire.write(outbox, wire.encode((wire.LOADING, what)))

    try:
        with telling(tell) if hello.tells_loading else nullcontext():
            core = load_core(hello.config, tokenizer_eos_ids=hello.tokenizer_eos_ids, executor=hello.executor)
    except Exception as error:
        traceback.print_exc()
        wire.write(outbox, wire.encode((wire.FAILED, wire.encode_error(error))))
        return 1
    wire.write(outbox, wire.encode((wire.READY, (core.info, core.stats()))))
    _Server(core, inbox, outbox).serve()
    return 0


def _import_for_good(modules: Iterable[str]) -> None:
    """Import modules whose objects are never looked through for garbage, neither now nor later."""
    gc.disable()
    for module in modules:
        with suppress(Exception):  # whoever needs it imports it again, and says what is wrong
            import_module(module)
    gc.freeze()
    gc.enable()


class _Server:
    """The engine loop between two pipes: a step takes in all that has come, and sends one packet at most."""

    def __init__(self, core: EngineCore, inbox: int, outbox: int):
        self._core = core
        self._outbox = outbox
        self._packets: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._is_ending = False
        self._stats_sent_at = 0.0
        threading.Thread(target=self._receive, args=(inbox,), name="batchgen-inbox", daemon=True).start()

    def serve(self) -> None:
        """Run until told to end."""
        is_idle_told = False
        while True:
            if is_idle_told and not self._core.has_work:
                self._take(self._packets.get())
                is_idle_told = False
            while not self._packets.empty():
                self._take(self._packets.get())
            if self._is_ending:
                break
            outputs = self._core.step()
            is_idle = not self._core.has_work
            now = time.monotonic()
            is_due = now - self._stats_sent_at >= STATS_INTERVAL_S or (is_idle and not is_idle_told)
            if outputs or is_due:
                stats = self._core.stats() if is_due else None
                self._stats_sent_at = now if is_due else self._stats_sent_at
                self._send(wire.STEP, (wire.encode_outputs(outputs), stats))
            is_idle_told = is_idle
        self._core.shutdown()

    def _take(self, packet: bytes) -> None:
        for command, argument in pickle.loads(packet):
            if command == "shutdown":
                self._is_ending = True
            elif command == "stats":
                self._send(wire.STATS, self._core.stats(argument))
            elif command == "call":
                self._answer(*argument)
            elif argument is None:
                getattr(self._core, command)()
            else:
                getattr(self._core, command)(argument)

    def _answer(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        """Do what is asked and say how it went; requests in flight stay where they are."""
        try:
            value = getattr(self._core, method)(*arguments)
        except Exception as error:
            if not isinstance(error, BatchgenError):
                traceback.print_exc()
            self._send(wire.ANSWER, (number, None, wire.encode_error(error)))
        else:
            self._send(wire.ANSWER, (number, value, None))

    def _send(self, kind: str, content: Any) -> None:
        wire.write(self._outbox, wire.encode((kind, content)))

    def _receive(self, inbox: int) -> None:
        """Move packets out of the pipe as they come, so that the caller is never kept waiting in a write."""
        while (packet := wire.read(inbox)) is not None:
            self._packets.put(packet)
        os._exit(0)  # the caller has closed its end or is gone; a step under way is of no use to anybody


def _claim_pipes() -> tuple[int, int]:
    """Keep stdin and stdout for packets; whoever else reads or prints gets /dev/null and stderr.

    The kept descriptors are not inherited by processes that we start, such as a compiler.
    """
    inbox, outbox = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return inbox, outbox


def _ignore_signals() -> None:
    """Leave it to the parent what an interrupt means: a terminal or a job system signals the whole group.

    The parent has started us with these signals blocked, so that none could come before this.
    """
    ignored = {signal.SIGINT, signal.SIGTERM}
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ignored)


def _die_with(parent_pid: int) -> None:
    """End when the parent does: by the kernel where it can, and by a thread that looks twice a second."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="batchgen-parent", daemon=True).start()


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # libraries' own threads need not be waited for
