"""Window: the rows in flight; bounded, in the order of their admission."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from batchgen.engine.messages import EngineRequest
from batchgen.jobs.row import Row


@dataclass(frozen=True, slots=True)
class Ready:
    """A row that waits for the engine: its request, and what its result will need.

    Args:
        request: carries the row's number as its id.
        num_input_tokens: length of the prompt.
        warnings: of rendering, for the output row.
    """

    row: Row
    request: EngineRequest
    num_input_tokens: int
    warnings: tuple[str, ...] = ()


class Window:
    """Rows handed to the engine and not finished.

    Args:
        capacity: rows at once.
        clock: seconds that never go back.

    Attributes:
        num_finished: adapter -> rows of it that were taken out.
    """

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic):
        self.capacity = capacity
        self._clock = clock
        self._rows: dict[str, tuple[Ready, float]] = {}
        self.num_finished: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def room(self) -> int:
        """Rows that may be admitted now."""
        return max(0, self.capacity - len(self._rows))

    def admit(self, ready: Ready) -> EngineRequest:
        """Take a row in; its request goes to the engine next."""
        self._rows[ready.request.request_id] = (ready, self._clock())
        return ready.request

    def finish(self, request_id: str) -> Ready:
        """Take a row out; KeyError when it is not in flight."""
        ready = self._rows.pop(request_id)[0]
        if ready.request.adapter is not None:
            self.num_finished[ready.request.adapter] += 1
        return ready

    def oldest(self, count: int) -> list[tuple[int, float]]:
        """(row number, seconds in flight) of the rows that are longest in flight."""
        now = self._clock()
        return [(ready.row.index, now - since) for ready, since in islice(self._rows.values(), count)]
