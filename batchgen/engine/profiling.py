"""Profiling: where the time of a core's steps goes, between two moments. No torch."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from batchgen.engine.messages import EngineProfile
from batchgen.engine.metrics import Counters
from batchgen.worker.executor import Executor


class Profiling:
    """Keeps time from the moment it is made.

    Args:
        executor: whose kernels are timed too.
        counters: of the scheduler.
    """

    def __init__(self, executor: Executor, counters: Counters):
        executor.begin_profile()
        self._executor = executor
        self._counters = counters
        self._first_step = counters.num_steps
        self._busy_s = 0.0
        self._begun_at = time.perf_counter()

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step, from its scheduling to what is told of it."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._busy_s += time.perf_counter() - started

    def end(self) -> EngineProfile:
        """What was kept; nothing is kept any more."""
        wall_s = time.perf_counter() - self._begun_at
        found = self._executor.end_profile()
        busy_s = self._busy_s - found.measuring_s
        scheduling_s = busy_s - sum(found.seconds.values())
        return EngineProfile(
            seconds={**found.seconds, "scheduling": scheduling_s, "idle": wall_s - self._busy_s},
            wall_s=wall_s - found.measuring_s,
            measuring_s=found.measuring_s,
            num_steps=self._counters.num_steps - self._first_step,
            num_tokens=found.num_tokens,
            num_rows=found.num_rows,
            ceilings={} if found.ceilings is None else asdict(found.ceilings),
            bound_s=found.bound_s,
        )
