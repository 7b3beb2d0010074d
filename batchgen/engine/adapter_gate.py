"""AdapterGate: lets a group run only once its LoRA adapter is in memory and has a slot. No torch."""

from itertools import chain, islice

from batchgen.engine.group import Group
from batchgen.engine.metrics import Counters
from batchgen.engine.request_table import RequestTable
from batchgen.engine.rules import Rules
from batchgen.outputs import RowFailure
from batchgen.worker.executor import AdapterMemory


class AdapterGate:
    """Who waits for an adapter, and who need not.

    Args:
        rules: how many adapters may run at once.
        table: the queues.
        counters: count who had to wait.
        memory: where adapters are brought before groups with them run; None: they are always there.
    """

    def __init__(
        self, rules: Rules, table: RequestTable, counters: Counters, memory: AdapterMemory | None = None
    ):
        self._rules, self._table, self._counters, self._memory = rules, table, counters, memory

    def begin_step(self) -> None:
        """A step is about to be planned: have those adapters brought that may be the next to run."""
        if self._memory is None:
            return
        self._memory.begin_step(self._running())
        heads = chain(
            islice(self._table.swapped, 1), islice(self._table.waiting, self._rules.skip_window + 1)
        )
        for adapter in [group.request.source.adapter for group in heads]:
            if adapter is not None:
                self._memory.want(adapter)

    def is_open(self, group: Group) -> bool:
        """Whether a group that does not run has a slot for its adapter, and the adapter is in memory."""
        adapter, most = group.request.source.adapter, self._rules.max_loras
        if adapter is None or most is None:
            return True
        running = self._running()
        if adapter not in running and len(running) >= most:
            self._counters.choices["skip_adapter"] += 1
            return False
        if self._memory is None or self._memory.want(adapter) is True:
            return True
        self._counters.choices["await_adapter"] += 1
        return False

    def turns_away(self, group: Group) -> bool:
        """Whether a group's adapter cannot be had any more; then the group has ended so."""
        adapter = group.request.source.adapter
        if adapter is None or self._memory is None:
            return False
        wanted = self._memory.want(adapter)
        if not isinstance(wanted, RowFailure):
            return False
        self._table.fail_group(group, wanted)
        return True

    def _running(self) -> set[str]:
        named = {group.request.source.adapter for group in self._table.running}
        return {adapter for adapter in named if adapter is not None}
