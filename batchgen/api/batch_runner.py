"""BatchRunner: many requests through an engine, outputs in the order of the requests; for LLM."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from batchgen.api.progress_bar import ProgressBar
from batchgen.api.stats_log import StatsLog
from batchgen.engine.client import EngineClient
from batchgen.engine.messages import EngineRequest, EngineStats
from batchgen.errors import EngineError
from batchgen.lora_request import LoRARequest
from batchgen.outputs import RequestOutput

# Requests handed to the engine for each that can run: enough to keep it full, few enough for flat memory.
_WINDOW_PER_SEQ = 4
# How old the numbers may be that another thread sees while one generates.
_STATS_S = 0.5

T = TypeVar("T")


class BatchRunner:
    """The one who talks to an engine for all threads of a caller; their calls run one after the other.

    Args:
        engine: a started engine.
        stats_log: gets a snapshot now and then while requests run.
    """

    def __init__(self, engine: EngineClient, stats_log: StatsLog):
        self.engine = engine
        self._stats_log = stats_log
        self._is_busy = threading.Lock()
        self._newest_stats = engine.stats()
        self._is_asleep = False
        self._enqueued: dict[str, RequestOutput | None] = {}
        self._enqueued_loras: dict[str, LoRARequest | None] = {}

    def run(self, requests: Iterator[EngineRequest], total: int, bar: ProgressBar) -> list[RequestOutput]:
        """Hand `total` requests over as there is room, and wait for all; `bar` is told of each that is done.

        Whatever ends it early takes its requests out of the engine.

        Raises:
            EngineError: the engine died, or sleeps.
        """
        with self._is_busy:
            self._check_awake()
            outputs: dict[str, RequestOutput | None] = {}  # in the order of the requests
            stats = self.engine.stats()
            bar.see(stats)
            window = _WINDOW_PER_SEQ * max(1, stats.max_num_seqs)
            num_done = 0
            with self._aborting(outputs):
                while num_done < total:
                    while len(outputs) < total and len(outputs) - num_done < window:
                        request = next(requests)
                        self.engine.add(request)
                        outputs[request.request_id] = None
                    num_done += self._take(outputs, bar)
        return [output for output in outputs.values() if output is not None]

    def enqueue(self, requests: Iterable[EngineRequest]) -> list[str]:
        """Hand requests over without waiting for them; `wait` gives their outputs."""
        with self._is_busy:
            self._check_awake()
            ids = []
            for request in requests:
                self.engine.add(request)
                self._enqueued[request.request_id] = None
                ids.append(request.request_id)
            return ids

    @property
    def num_enqueued(self) -> int:
        """Requests that `wait` gives the outputs of."""
        return len(self._enqueued)

    def wait(self, bar: ProgressBar) -> list[RequestOutput]:
        """The outputs of all that was enqueued since the last time, in that order."""
        with self._is_busy:
            self._check_awake()
            bar.see(self.engine.stats())
            with self._aborting(self._enqueued):
                num_open = 0
                for output in self._enqueued.values():
                    if output is None:
                        num_open += 1
                    else:
                        bar.add(output)
                while num_open:
                    num_open -= self._take(self._enqueued, bar)
            outputs, self._enqueued = self._enqueued, {}
            loras, self._enqueued_loras = self._enqueued_loras, {}
        for request_id, output in outputs.items():
            if output is not None:
                output.tell_lora(loras.get(request_id))
        return [output for output in outputs.values() if output is not None]

    def remember_loras(self, loras: Iterable[tuple[str, LoRARequest | None]]) -> None:
        """Be told with which adapters enqueued requests are computed, to tell it with their outputs."""
        self._enqueued_loras |= {request_id: lora for request_id, lora in loras if lora is not None}

    def ask(self, command: Callable[..., T], *arguments: object) -> T:
        """Call one of the engine's methods when no other thread does."""
        with self._is_busy:
            return command(*arguments)

    def sleep(self, level: int) -> None:
        """Put the engine to sleep."""
        self.ask(self.engine.sleep, level)
        self._is_asleep = True

    def wake_up(self) -> None:
        """Wake the engine; nothing happens if it is awake."""
        if self._is_asleep:
            self.ask(self.engine.wake_up)
            self._is_asleep = False

    @property
    def is_asleep(self) -> bool:
        """Whether the engine sleeps."""
        return self._is_asleep

    def stats(self) -> EngineStats:
        """A snapshot: of this moment, or as another thread that is running requests saw it last."""
        if not self._is_busy.acquire(blocking=False):
            return self._newest_stats
        try:
            return self.engine.stats(with_block_map=True)
        finally:
            self._is_busy.release()

    def _take(self, outputs: dict[str, RequestOutput | None], bar: ProgressBar) -> int:
        """Take in what has finished; how many of `outputs` that was."""
        count = 0
        for output in self.engine.poll(_STATS_S):
            if not output.finished:
                continue
            if output.request_id in outputs:
                outputs[output.request_id] = output
                count += 1
                bar.add(output)
            elif output.request_id in self._enqueued:
                self._enqueued[output.request_id] = output
            # Otherwise an interrupted call has left it behind.
        self._newest_stats = self.engine.stats()
        self._stats_log.see(self._newest_stats)
        bar.see(self._newest_stats)
        return count

    def _check_awake(self) -> None:
        if self._is_asleep:
            raise EngineError("the engine sleeps; call wake_up() first")

    @contextmanager
    def _aborting(self, outputs: dict[str, RequestOutput | None]) -> Iterator[None]:
        """Whatever ends a call early takes its requests out of the engine: the next call starts clean."""
        try:
            yield
        except BaseException:
            ids = [request_id for request_id, output in outputs.items() if output is None]
            with suppress(EngineError):  # a dead engine computes nothing; the first error is the one to show
                self.engine.abort(ids)
            if outputs is self._enqueued:
                self._enqueued, self._enqueued_loras = {}, {}
            raise
