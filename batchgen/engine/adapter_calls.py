"""AdapterCalls: what an engine core is told about adapters, and how a request comes to its own."""

import logging
from dataclasses import replace

from batchgen.engine.adapters import NO_SLOTS, Adapters
from batchgen.engine.messages import AdapterInfo, EngineRequest
from batchgen.engine.scheduler import Scheduler
from batchgen.errors import ConfigError
from batchgen.outputs import RowFailure
from batchgen.worker.executor import Executor

log = logging.getLogger(__name__)


class AdapterCalls:
    """The part of EngineCore that has to do with LoRA adapters."""

    executor: Executor
    _adapters: Adapters
    _scheduler: Scheduler

    def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Check a LoRA adapter's files and let requests name it: see `EngineClient.load_adapter`."""
        if self.executor.adapters is None:
            raise ConfigError(f"adapter {name!r} ({path}): {NO_SLOTS}")
        info = self._adapters.enter(self.executor.adapters.load(name, path))
        for warning in info.warnings:
            log.warning("adapter %s (%s): %s", name, path, warning)
        self._drop_adapters()
        return info

    def unload_adapter(self, name: str) -> bool:
        """Let no further request name an adapter; whether there was one."""
        found = self._adapters.forget(name) is not None
        self._drop_adapters()
        return found

    def adapters(self) -> list[AdapterInfo]:
        """The adapters that requests may name."""
        return self._adapters.known()

    def pin_adapter(self, name: str) -> bool:
        """Keep an adapter in memory; whether there is one of that name."""
        if self.executor.adapters is None or name not in self._adapters:
            return False
        self.executor.adapters.pin(self._adapters[name].content_hash)
        return True

    def _with_adapter(self, request: EngineRequest) -> tuple[EngineRequest, RowFailure | None]:
        """The request with its adapter's content hash in place of the name, or why it cannot have it.

        From here on an adapter is its content, whatever its name comes to stand for.
        """
        if request.adapter is None:
            return request, None
        if request.adapter in self._adapters:
            return replace(request, adapter=self._adapters[request.adapter].content_hash), None
        has_slots = self.executor.adapters is not None
        return request, self._adapters.refusal(request.adapter, has_slots=has_slots)

    def _drop_adapters(self) -> None:
        """Let go of forgotten adapters that nobody computes with any longer."""
        if self._adapters.has_nameless:
            requests = self._scheduler.table.requests.values()
            self._adapters.drop_unused(
                {request.source.adapter for request in requests if request.source.adapter is not None}
            )
