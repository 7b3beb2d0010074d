"""HostMemory: packed adapters in host memory; read in the background, the longest unused ones go first."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection

from batchgen.errors import BatchgenError, CapacityError
from batchgen.lora.packed_adapter import PackedAdapter

log = logging.getLogger("batchgen.lora")

# How long a failure to read an adapter is an answer; whoever asks later has it tried again.
_FAILURE_S = 5.0


class HostMemory:
    """Which adapters are there, which are on their way, and which make room.

    One thread uses it, beside that which reads. Adapters that are computed with, that were wanted since the
    last `begin_step`, and pinned ones stay.

    Args:
        read: reads and packs an adapter, in a thread of its own.
        size: bytes that one will take, about.
        evicted: told of an adapter before it goes.
        least: so many besides pinned ones there is always room for, one for each slot.
        most: no more than so many at once; None: what `budget` allows.

    Attributes:
        budget: bytes.
    """

    def __init__(
        self,
        read: Callable[[str], PackedAdapter],
        size: Callable[[str], int],
        evicted: Callable[[str], None],
        *,
        least: int,
        most: int | None = None,
    ):
        self._size, self._evicted = size, evicted
        self._least, self._most, self.budget = least, most, 0
        self._reader = _Reader(read)
        # In the order in which they were last wanted.
        self._there: dict[str, PackedAdapter] = {}
        # Those on their way, with the bytes that they will take.
        self._coming: dict[str, int] = {}
        self._dropped: set[str] = set()
        self._failed: dict[str, tuple[str, float]] = {}
        self._pinned: set[str] = set()
        self._running: frozenset[str] = frozenset()
        self._wanted: set[str] = set()

    def __getitem__(self, adapter: str) -> PackedAdapter:
        return self._there[adapter]

    def __len__(self) -> int:
        return len(self._there)

    def begin_step(self, running: Collection[str]) -> None:
        """A step is about to be planned; adapters of those that run stay."""
        self._running = frozenset(running)
        self._wanted.clear()
        self._take_arrived()

    def want(self, adapter: str) -> bool | str:
        """Whether an adapter is there; if not it is read as soon as there is room. A text: why it cannot."""
        self._take_arrived()
        self._wanted.add(adapter)
        if adapter in self._there:
            self._there[adapter] = self._there.pop(adapter)
            return True
        failure = self._failed.get(adapter)
        if failure is not None and time.monotonic() - failure[1] < _FAILURE_S:
            return failure[0]
        self._dropped.discard(adapter)
        if adapter not in self._coming:
            size = self._size(adapter)
            if self._make_room(size):
                self._failed.pop(adapter, None)
                self._coming[adapter] = size
                self._reader.begin(adapter)
        return False

    def wait(self, timeout_s: float) -> bool:
        """Wait until an adapter on its way has arrived; False, at once, if there is none."""
        if not self._coming:
            return False
        self._take_arrived(timeout_s)
        return True

    def pin(self, adapter: str) -> bool:
        """Keep an adapter from going, once it is there; False if no room would be left for another."""
        if self._most is not None and len(self._pinned | {adapter}) >= self._most:
            return False
        self._pinned.add(adapter)
        return True

    def drop(self, adapter: str) -> None:
        """Let an adapter go; nobody computes with it."""
        self._pinned.discard(adapter)
        self._failed.pop(adapter, None)
        if adapter in self._coming:
            self._dropped.add(adapter)
        if adapter in self._there:
            self._evict(adapter)

    def clear(self) -> None:
        """Let all go; they are read again when they are wanted. Nobody computes."""
        for adapter in list(self._there):
            self._evict(adapter)

    def forget_failure(self, adapter: str) -> None:
        """Its files were looked at again and are whole."""
        self._failed.pop(adapter, None)

    def close(self) -> None:
        """End the thread that reads. May be called twice."""
        self._reader.close()

    def _take_arrived(self, timeout_s: float = 0.0) -> None:
        while (arrived := self._reader.arrived(timeout_s)) is not None:
            adapter, found = arrived
            del self._coming[adapter]
            if adapter in self._dropped:
                self._dropped.discard(adapter)
            elif isinstance(found, PackedAdapter):
                self._there[adapter] = found
            else:
                self._failed[adapter] = found, time.monotonic()
            timeout_s = 0.0

    def _make_room(self, size: int) -> bool:
        """Whether there is room for one more, those that may go gone."""
        while not self._has_room(size):
            staying = self._running | self._wanted | self._pinned
            victim = next((adapter for adapter in self._there if adapter not in staying), None)
            if victim is None:
                return False
            self._evict(victim)
        return True

    def _has_room(self, size: int) -> bool:
        count = len(self._there) + len(self._coming)
        if self._most is not None:
            return count < self._most
        if count - len(self._pinned & self._there.keys()) < self._least:
            return True
        taken = sum(each.num_bytes for each in self._there.values())
        taken += sum(self._coming.values())
        return taken + size <= self.budget

    def _evict(self, adapter: str) -> None:
        self._evicted(adapter)
        del self._there[adapter]


class _Reader:
    """A thread that reads one adapter after the other; it begins with the first."""

    def __init__(self, read: Callable[[str], PackedAdapter]):
        self._read = read
        self._asked: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._arrived: queue.SimpleQueue[tuple[str, PackedAdapter | str]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, adapter: str) -> None:
        """Read an adapter after those before it."""
        if self._thread is None:
            # It holds no reference to its owner, which would otherwise live as long as the process.
            arguments = (self._read, self._asked, self._arrived)
            self._thread = threading.Thread(
                target=_serve, args=arguments, name="batchgen-adapters", daemon=True
            )
            self._thread.start()
        self._asked.put(adapter)

    def arrived(self, timeout_s: float) -> tuple[str, PackedAdapter | str] | None:
        """The next one that was read, or why it could not be; None if there is none in time."""
        try:
            return self._arrived.get(timeout=timeout_s) if timeout_s else self._arrived.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        self._asked.put(None)


def _serve(
    read: Callable[[str], PackedAdapter],
    asked: "queue.SimpleQueue[str | None]",
    arrived: "queue.SimpleQueue[tuple[str, PackedAdapter | str]]",
) -> None:
    while (adapter := asked.get()) is not None:
        started = time.perf_counter()
        try:
            found: PackedAdapter | str = read(adapter)
        except MemoryError as error:
            found = f"{CapacityError.__name__}: no memory for it ({error})"
        except Exception as error:  # whatever it is, the rows that wait must hear of it
            if not isinstance(error, BatchgenError):
                log.exception("an adapter could not be read")
            found = str(error) or repr(error)
        log.debug("adapter %.12s read in %.0f ms", adapter, 1000 * (time.perf_counter() - started))
        arrived.put((adapter, found))
