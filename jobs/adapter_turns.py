"""AdapterTurns: in which order rows go to the engine, so that few adapters are in flight at once."""

from collections import deque
from dataclasses import dataclass

from batchgen.jobs.window import Ready


@dataclass(slots=True)
class _Turn:
    """An adapter in flight: how many of its rows are, and how many rows of any had come when it began."""

    begun: int
    num_rows: int = 0


class AdapterTurns:
    """Rows that are ready and not in flight.

    They go in the order they came, but no more than `max_adapters` adapters are in flight at once: a row
    whose adapter is among them, or that needs none, passes older ones whose adapter is not. So an adapter
    stays in flight as long as it has rows, and few are changed. No row waits for long: rows come in only up
    to `most_ahead` beyond the oldest that waits, and at half of that the adapter that is in flight longest,
    of those whose rows from before their turn are all gone, gets no more until the oldest has had its turn.

    Args:
        max_adapters: in flight at once; None: any number, and no row ever waits.
        most_ahead: see above; may change.
    """

    def __init__(self, max_adapters: int | None = None, most_ahead: int = 1):
        self.most_ahead = most_ahead
        self._max_adapters = max_adapters
        # Adapter -> its rows, each with its running number.
        self._waiting: dict[str | None, deque[tuple[int, Ready]]] = {}
        # The one that is in flight longest comes first.
        self._in_flight: dict[str, _Turn] = {}
        self._leaving: str | None = None
        self._num_put = 0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def room(self, most: int) -> int:
        """Rows that may be put in now, at most `most`."""
        if not self._waiting:
            return most
        return max(0, min(most, self.most_ahead - self._age(self._oldest())))

    def put(self, ready: Ready) -> None:
        """Take a row in."""
        self._waiting.setdefault(ready.request.adapter, deque()).append((self._num_put, ready))
        self._num_put += 1

    def next(self) -> Ready | None:
        """The row that goes to the engine now; None if all have to wait."""
        if not self._waiting:
            return None
        oldest = self._oldest()
        if self._leaving is None and not self._may_go(oldest) and 2 * self._age(oldest) >= self.most_ahead:
            self._leaving = next((each for each in self._in_flight if self._has_had_turn(each)), None)
        ahead = [adapter for adapter in self._waiting if self._may_go(adapter)]
        if not ahead:
            return None
        adapter = min(ahead, key=self._number)
        ready = self._waiting[adapter].popleft()[1]
        if not self._waiting[adapter]:
            del self._waiting[adapter]
        if adapter is not None:
            self._in_flight.setdefault(adapter, _Turn(self._num_put)).num_rows += 1
        return ready

    def finish(self, ready: Ready) -> None:
        """Take note that a row is no longer in flight."""
        adapter = ready.request.adapter
        if adapter is None:
            return
        self._in_flight[adapter].num_rows -= 1
        if not self._in_flight[adapter].num_rows:
            del self._in_flight[adapter]
            self._leaving = None if self._leaving == adapter else self._leaving

    def _may_go(self, adapter: str | None) -> bool:
        if adapter is None or self._max_adapters is None:
            return True
        if adapter in self._in_flight:
            return adapter != self._leaving
        return len(self._in_flight) < self._max_adapters

    def _has_had_turn(self, adapter: str) -> bool:
        return adapter not in self._waiting or self._number(adapter) >= self._in_flight[adapter].begun

    def _oldest(self) -> str | None:
        return min(self._waiting, key=self._number)

    def _number(self, adapter: str | None) -> int:
        return self._waiting[adapter][0][0]

    def _age(self, adapter: str | None) -> int:
        """Rows that came after the first of an adapter's."""
        return self._num_put - self._number(adapter)
