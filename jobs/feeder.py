"""RowFeeder: rows rendered and tokenized in threads, in order, a bounded stretch ahead of the engine."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from queue import Empty, Full, Queue

from batchgen.jobs.row import Row, RowResult, SourceBatch
from batchgen.jobs.row_reader import RowReader
from batchgen.jobs.window import Ready

# Rows that one call of a worker renders: enough to make handing them over cheap.
_CHUNK_ROWS = 16
# Chunks ahead of the engine, tokens in them and bytes of their source batches: whichever is reached first
# holds the reader back.
_MAX_CHUNKS = 64
_MAX_TOKENS = 4 << 20
_MAX_BYTES = 64 << 20
_PATIENCE_S = 0.05

Item = Ready | RowResult
Render = Callable[[Row], Item]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows that are being rendered, and how many bytes of source batches nobody needs once they are taken."""

    items: Future[list[Item]]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _End:
    """The last thing in the queue: reading is over, by itself or because of an error."""

    error: BaseException | None = None


class RowFeeder:
    """Rendered rows in the order of the source.

    Args:
        reader: the rows.
        render: row -> Ready, or RowResult when it failed; pure and thread-safe.
        num_threads: threads that render.
    """

    def __init__(self, reader: RowReader, render: Render, num_threads: int = 2):
        self._reader, self._render = reader, render
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="batchgen-render")
        self._queue: Queue[_Chunk | _End] = Queue(_MAX_CHUNKS)
        self._head: _Chunk | None = None
        self._rest: list[Item] = []
        self._end: _End | None = None
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._num_tokens = 0
        self._num_bytes = 0
        self.num_taken = 0
        self._thread = threading.Thread(target=self._read, name="batchgen-read", daemon=True)
        self._thread.start()

    @property
    def is_exhausted(self) -> bool:
        """Whether `take` has given everything."""
        return self._end is not None and not self._rest

    @property
    def rows_total(self) -> int | None:
        """Rows of the source that are wanted, once that is known."""
        return self._reader.rows_total

    def take(self, max_rows: int, wait_s: float = 0.0) -> list[Item]:
        """The next rows, at most so many; [] when none is ready within `wait_s`, or all are taken.

        Raises:
            SourceError: reading broke off; every row before that was given.
        """
        while not self._rest and self._end is None:
            chunk = self._next_chunk(wait_s)
            if chunk is None:
                return []
            self._rest = chunk
        taken, self._rest = self._rest[:max_rows], self._rest[max_rows:]
        if taken:
            self.num_taken += len(taken)
            with self._lock:
                self._num_tokens -= sum(_num_tokens(item) for item in taken)
        elif self._end is not None and self._end.error is not None:
            raise self._end.error
        return taken

    def close(self) -> None:
        """Stop reading and rendering; what was not taken is dropped."""
        self._closed.set()
        self._thread.join()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _next_chunk(self, wait_s: float) -> list[Item] | None:
        try:
            if self._head is None:
                head = self._queue.get(timeout=wait_s) if wait_s > 0 else self._queue.get_nowait()
                if isinstance(head, _End):
                    self._end = head
                    return []
                self._head = head
            items = self._head.items.result(timeout=wait_s)
        except (Empty, FutureTimeoutError):
            return None
        with self._lock:
            self._num_bytes -= self._head.num_bytes
        self._head = None
        return items

    def _read(self) -> None:
        end = _End()
        try:
            for batch, offsets in self._reader:
                for start in range(0, len(offsets), _CHUNK_ROWS):
                    is_last = start + _CHUNK_ROWS >= len(offsets)
                    # A batch lives as long as any of its rows.
                    num_bytes = batch.columns.nbytes if is_last else 0
                    if not self._submit(batch, offsets[start : start + _CHUNK_ROWS], num_bytes):
                        return
        except BaseException as error:  # handed to the thread that takes
            end = _End(error)
        self._put(end)

    def _submit(self, batch: SourceBatch, offsets: Sequence[int], num_bytes: int) -> bool:
        while self._num_tokens > _MAX_TOKENS or self._num_bytes > _MAX_BYTES:
            if self._closed.wait(_PATIENCE_S):
                return False
        if self._closed.is_set():
            return False
        with self._lock:
            self._num_bytes += num_bytes
        return self._put(_Chunk(self._pool.submit(self._render_chunk, batch, offsets), num_bytes))

    def _put(self, item: _Chunk | _End) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=_PATIENCE_S)
                return True
            except Full:
                continue
        return False

    def _render_chunk(self, batch: SourceBatch, offsets: Sequence[int]) -> list[Item]:
        items = [self._render(Row(batch, offset)) for offset in offsets]
        with self._lock:
            self._num_tokens += sum(_num_tokens(item) for item in items)
        return items


def _num_tokens(item: Item) -> int:
    return item.num_input_tokens if isinstance(item, Ready) else 0
