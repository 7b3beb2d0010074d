"""EngineThread: the one thread that talks to an engine for any number of event loops and threads."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from batchgen.api.output_stream import OutputStream
from batchgen.api.stats_log import StatsLog
from batchgen.engine.client import EngineClient
from batchgen.engine.messages import EngineRequest
from batchgen.errors import BatchgenError, EngineError
from batchgen.outputs import RequestOutput

log = logging.getLogger(__name__)

T = TypeVar("T")

# How long a poll may wait when nothing happens; whoever has something to say wakes it.
_POLL_S = 1.0


class _Order(NamedTuple):
    """What the thread is asked to do; `refuse` tells whoever asked why it was not done."""

    task: Callable[[], None]
    refuse: Callable[[BatchgenError], None]


class EngineThread:
    """Adds, aborts and polls; outputs go to their streams, in the streams' own event loops.

    Its methods may be called from any thread and never wait. Orders are carried out in the order in which
    they were given, so a request can be aborted and its id used again at once.

    Args:
        client: a started engine; nobody else may talk to it from now on.
        stats_log: gets snapshots while requests run.
    """

    def __init__(self, client: EngineClient, stats_log: StatsLog):
        self.death: EngineError | None = None
        self._client = client
        self._stats_log = stats_log
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._streams: dict[str, OutputStream] = {}
        self._lock = threading.Lock()  # of `_is_over` and what is put into `_orders`
        self._is_over = False
        self._is_ending = False
        self._is_polling = False
        self._thread = threading.Thread(target=self._run, name="batchgen-engine", daemon=True)
        self._thread.start()

    def add(self, request: EngineRequest, stream: OutputStream) -> None:
        """Start a request; its outputs, or the reason why there are none, come through the stream."""
        self._order(lambda: self._add(request, stream), lambda error: _in_loop(stream, stream.fail, error))

    def abort(self, stream: OutputStream) -> None:
        """Drop the request of a stream whose reader is gone. Nothing happens if it has finished."""
        self._order(lambda: self._abort([stream.request_id], only=stream), lambda error: None)

    def abort_ids(self, request_ids: Sequence[str]) -> "Future[None]":
        """Drop requests; their readers end with what there is. Unknown ids are ignored."""
        return self.ask(lambda client: self._abort(request_ids))

    def ask(self, question: Callable[[EngineClient], T]) -> "Future[T]":
        """Have the engine do or tell something, between two polls."""
        answer: Future[T] = Future()

        def task() -> None:
            if answer.set_running_or_notify_cancel():
                answer.set_result(question(self._client))

        def refuse(error: BatchgenError) -> None:
            if not answer.cancelled():
                answer.set_exception(error)

        self._order(task, refuse)
        return answer

    def in_flight(self) -> list[str]:
        """Ids of the requests not finished; after the engine's death those that it died with."""
        return list(self._streams)

    def shutdown(self, wait_s: float | None = None) -> None:
        """End the engine; whoever still waits gets an EngineError. May be called twice."""
        self._is_ending = True
        self._order(lambda: None, lambda error: None)
        if threading.current_thread() is not self._thread:
            self._thread.join(wait_s)

    def _order(self, task: Callable[[], None], refuse: Callable[[BatchgenError], None]) -> None:
        with self._lock:
            is_over = self._is_over
            if not is_over:
                self._orders.put(_Order(task, refuse))
        if is_over:
            refuse(self._last_error())
        elif self._is_polling:
            self._client.wake()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self.death = (
                error if isinstance(error, EngineError) else EngineError(f"the engine failed: {error!r}")
            )
            if not isinstance(error, BatchgenError):
                log.exception("the engine failed")
        finally:
            self._end()

    def _serve(self) -> None:
        while not self._is_ending:
            if not self._streams:
                self._do(self._orders.get())
            while not self._orders.empty():
                self._do(self._orders.get())
            # First say that it may be needed to wake us, then look once more: nobody's word is missed.
            self._is_polling = bool(self._streams)
            if self._is_polling and self._orders.empty():
                self._tell(self._client.poll(_POLL_S))
                if self._stats_log.is_due:
                    self._stats_log.see(self._client.stats())
            self._is_polling = False

    @staticmethod
    def _do(order: _Order) -> None:
        """Carry an order out; its error is for whoever gave it. A dead engine shows at the next poll.

        Raises:
            Exception: one that nobody foresaw; whoever gave the order is told that the engine failed.
        """
        try:
            order.task()
        except BatchgenError as error:
            order.refuse(error)
        except Exception as error:
            order.refuse(EngineError(f"the engine failed: {error!r}"))
            raise

    def _add(self, request: EngineRequest, stream: OutputStream) -> None:
        if request.request_id in self._streams:
            raise EngineError(f"request id {request.request_id!r} is already in flight; ids must be unique")
        self._client.add(request)
        self._streams[request.request_id] = stream

    def _abort(self, request_ids: Sequence[str], only: OutputStream | None = None) -> None:
        found = [
            stream
            for request_id in request_ids
            if (stream := self._streams.get(request_id)) is not None and only in (None, stream)
        ]
        self._client.abort([stream.request_id for stream in found])
        for stream in found:
            del self._streams[stream.request_id]
            _in_loop(stream, stream.end_aborted)

    def _tell(self, outputs: Sequence[RequestOutput]) -> None:
        """Hand outputs to their streams, with one call into each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[OutputStream, RequestOutput]]] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finished:
                del self._streams[output.request_id]
            by_loop.setdefault(stream.loop, []).append((stream, output))
        for loop, pairs in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, pairs)
            except RuntimeError:  # the loop was closed with requests in flight: nobody will read them
                gone = [stream.request_id for stream in self._streams.values() if stream.loop is loop]
                self._client.abort(gone)
                for request_id in gone:
                    del self._streams[request_id]

    def _last_error(self) -> EngineError:
        return EngineError(*self.death.args) if self.death else EngineError("the engine was shut down")

    def _end(self) -> None:
        """Nothing is taken in any more, and nobody is left waiting."""
        with self._lock:
            self._is_over = True
        with suppress(Exception):
            self._client.shutdown()
        error = self._last_error()
        for stream in self._streams.values():
            _in_loop(stream, stream.fail, error)
        while not self._orders.empty():
            self._orders.get().refuse(error)


def _put_all(pairs: Sequence[tuple[OutputStream, RequestOutput]]) -> None:
    for stream, output in pairs:
        stream.put(output)


def _in_loop(stream: OutputStream, call: Callable[..., None], *arguments: Any) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody waits
        stream.loop.call_soon_threadsafe(call, *arguments)
