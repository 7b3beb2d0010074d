"""The order of the queues: who is admitted first and who is preempted first."""

from bisect import bisect_left, insort
from collections.abc import Callable
from operator import attrgetter

from batchgen.engine.group import Group
from batchgen.engine.request import Request

Rank = Callable[[Request], int]

_by_order = attrgetter("order")


def fcfs(request: Request) -> int:
    """First come, first served: nobody is strictly ahead, the last arrival is the first to be preempted."""
    return 0


def priority(request: Request) -> int:
    """Lower values first, ties by arrival; the largest value that came last is the first to be preempted."""
    return request.source.priority


# scheduling_policy -> rank; a smaller rank is served first, equal ranks by arrival.
POLICIES: dict[str, Rank] = {"fcfs": fcfs, "priority": priority}


class GroupQueue(list[Group]):
    """Groups in their order, smallest first."""

    def add(self, group: Group) -> None:
        """Enter a group at its place."""
        if not self or self[-1].order < group.order:
            self.append(group)
        else:
            insort(self, group, key=_by_order)

    def take(self, group: Group) -> None:
        """Take a group out."""
        place = bisect_left(self, group.order, key=_by_order)
        assert self[place] is group, f"request {group.request.request_id} is not in this queue"
        del self[place]
