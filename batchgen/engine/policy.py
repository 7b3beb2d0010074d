"""The order of the queues: who is admitted first and who is preempted first."""

import heapq
from collections.abc import Callable, Iterator

from batchgen.engine.sequence import Sequence, SequenceState

OrderKey = Callable[[Sequence], tuple[int, ...]]


def fcfs(sequence: Sequence) -> tuple[int, ...]:
    """First come, first served: the last arrival is the first to be preempted."""
    return (sequence.request.arrival, sequence.index)


# scheduling_policy -> key; the smallest key is served first, the largest is preempted first.
POLICIES: dict[str, OrderKey] = {"fcfs": fcfs}


class WaitingQueue:
    """Waiting sequences, smallest `order` first; a preempted one so comes back to the front.

    Removing is lazy: a sequence that is no longer waiting is dropped when it comes to the head.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, ...], Sequence]] = []
        self._num_removed = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_removed

    def __iter__(self) -> Iterator[Sequence]:
        return (entry[1] for entry in sorted(self._heap) if entry[1].state is SequenceState.WAITING)

    def push(self, sequence: Sequence) -> None:
        """Enter a sequence; its state becomes WAITING."""
        sequence.state = SequenceState.WAITING
        heapq.heappush(self._heap, (sequence.order, sequence))

    def head(self) -> Sequence | None:
        """The sequence to be served next, or None."""
        while self._heap:
            sequence = self._heap[0][1]
            if sequence.state is SequenceState.WAITING:
                return sequence
            heapq.heappop(self._heap)
            self._num_removed -= 1
        return None

    def pop(self) -> Sequence:
        """Take out the head, which `head` has just shown."""
        return heapq.heappop(self._heap)[1]

    def removed(self, sequence: Sequence) -> None:
        """Be told that a waiting sequence has got another state without being popped."""
        self._num_removed += 1
        if self._num_removed > 64 and self._num_removed > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if entry[1].state is SequenceState.WAITING]
            heapq.heapify(self._heap)
            self._num_removed = 0
